"""One process of a run: imports a Hugging Face model, writes the bytes read and shards held. See test_hf_import.py.

read_hf_params.py OUTPUT PROCESS COUNT PORT MODEL REF
"""

import json

import numpy as np
from multihost.joining import join_processes

import lmtrain.hf.safetensors_file as safetensors_file


def main() -> None:
    output, (model, ref) = join_processes()
    taken = [0]
    real = safetensors_file._read

    def counting(path: str, begin: int, end: int) -> bytes:
        content = real(path, begin, end)
        taken[0] += len(content)
        return content

    safetensors_file._read = counting

    from lmtrain.models.params import flatten
    from lmtrain.models.registry import build_model
    from lmtrain.run.config import RunConfig
    from lmtrain.sharding.config import PartitioningConfig
    from lmtrain.sharding.mesh import build_layout
    from lmtrain.weights.load_hf import load_hf_params

    config = RunConfig.model_validate({"model": json.loads(model)}).model
    vocab_size = 500
    layout = build_layout(PartitioningConfig())
    params = flatten(load_hf_params(ref, config, build_model(config, vocab_size), layout, "float32"))
    held = {
        f"{path} {shard.index}": float(np.abs(np.asarray(shard.data, np.float64)).sum())
        for path, array in params.items()
        for shard in array.addressable_shards
    }
    with open(output, "w") as file:
        json.dump({"taken": taken[0], "held": held, "devices": layout.mesh.size}, file)


if __name__ == "__main__":
    main()
