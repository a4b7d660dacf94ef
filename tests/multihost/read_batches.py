"""One process of a run: reads global batches and writes which rows of each it holds. Started by test_batches.py.

read_batches.py OUTPUT PROCESS COUNT PORT CONFIG
"""

import hashlib
import json

import numpy as np
from multihost.joining import join_processes

from lmtrain.data.batches import TrainSource, iterate
from lmtrain.data.caches import build_mixture, open_store
from lmtrain.data.config import BatchSizes
from lmtrain.preprocess.prepare import find_caches
from lmtrain.run.config import RunConfig, data_seed

STEPS = 100


def main() -> None:
    output, (config_file,) = join_processes()

    import jax

    from lmtrain.sharding.mesh import build_layout
    from lmtrain.sharding.placement import LocalPart

    assert jax.device_count() == 4
    with open(config_file) as file:
        config = RunConfig(**json.load(file))
    caches = find_caches(config.data)
    layout = build_layout(config.trainer)
    size, seq_len = config.trainer.train_batch_size, config.model.seq_len
    part = LocalPart.of(layout.batch, size, seq_len)
    stores = [open_store(config.data, cache) for cache in caches.train.values()]
    sizes = BatchSizes.of(size)
    mixture = build_mixture(config.data, list(caches.train), sizes, data_seed(config))
    source = TrainSource(
        stores=stores,
        mixture=mixture,
        seq_len=seq_len,
        batch_sizes=sizes,
        rows={size: part.rows},
        num_steps=STEPS,
        shuffle=config.data.shuffle,
        seed=data_seed(config),
        mask_across_documents=True,
        columns=part.columns,
    )
    held: dict[str, str] = {}
    for step, local in enumerate(iterate(source)):
        batch = part.place(local)
        for name, array in batch.items():
            assert array.shape == (size, seq_len)
            for shard in array.addressable_shards:
                first, begin = shard.index[0].indices(size)[0], shard.index[1].indices(seq_len)[0]
                for number, row in enumerate(np.asarray(shard.data), start=first):
                    held[f"{step} {name} {number} {begin}"] = hashlib.sha256(row.tobytes()).hexdigest()
    with open(output, "w") as file:
        json.dump({"rows": part.rows.tolist(), "columns": [part.columns.start, part.columns.stop], "held": held}, file)


if __name__ == "__main__":
    main()
