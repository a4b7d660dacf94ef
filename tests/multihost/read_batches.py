"""One process of a run: reads global batches and writes which rows of each it holds. Started by test_batches.py.

read_batches.py OUTPUT PROCESS COUNT PORT CONFIG
"""

import hashlib
import json
import sys

import numpy as np

from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.data.batches import TrainSource, iterate
from lmtrain.data.caches import open_store, plan_mixture
from lmtrain.preprocess.prepare import plan_caches
from lmtrain.run.config import RunConfig, data_seed
from lmtrain.runtime.config import DistributedConfig
from lmtrain.runtime.distributed import start_processes

STEPS = 100


def main() -> None:
    output, process, count, port, config_file = sys.argv[1:]
    distributed = DistributedConfig()
    if count != "1":
        distributed = DistributedConfig(
            coordinator_address=f"127.0.0.1:{port}", num_processes=int(count), process_id=int(process)
        )
    processes = start_processes(distributed)
    assert (processes.index, processes.count) == (int(process), int(count))

    import jax

    from lmtrain.sharding.mesh import plan_layout
    from lmtrain.sharding.placement import local_rows, place_batch

    assert jax.device_count() == 4
    with open(config_file) as file:
        config = RunConfig(**json.load(file))
    caches = plan_caches(config.data).caches
    layout = plan_layout(config.trainer)
    size, seq_len = config.trainer.train_batch_size, config.model.seq_len
    rows = local_rows(layout.batch, size)
    stores = [open_store(config.data, cache) for cache in caches.train.values()]
    sizes = BatchSizes.of(size)
    mixture = plan_mixture(config.data, list(caches.train), sizes, data_seed(config))
    source = TrainSource(
        stores, mixture, seq_len, sizes, {size: rows}, STEPS, config.data.shuffle, data_seed(config), True
    )
    held: dict[str, str] = {}
    for step, local in enumerate(iterate(source)):
        batch = place_batch(local, layout.batch, rows, size)
        for name, array in batch.items():
            assert array.shape == (size, seq_len)
            for shard in array.addressable_shards:
                first = shard.index[0].indices(size)[0]
                for number, row in enumerate(np.asarray(shard.data), start=first):
                    held[f"{step} {name} {number}"] = hashlib.sha256(row.tobytes()).hexdigest()
    with open(output, "w") as file:
        json.dump({"rows": rows.tolist(), "held": held}, file)


if __name__ == "__main__":
    main()
