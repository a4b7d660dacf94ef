"""How a batch is divided: over devices, and into microbatches."""

from dataclasses import dataclass

from lmtrain.config.errors import UserError
from lmtrain.train.config import TrainerConfig


@dataclass(frozen=True)
class Batching:
    """Sizes in sequences. A device computes `train_batch / (shards * microbatches)` of them at once."""

    train_batch: int
    eval_batch: int
    num_microbatches: int


def plan_batching(config: TrainerConfig, shards: int) -> Batching:
    """Divide the batch over `shards` parts of the mesh. Raises `UserError` with the sizes that would work."""
    batch = config.train_batch_size
    if batch % shards:
        below, above = batch // shards * shards, -(-batch // shards) * shards
        raise UserError(
            f"trainer.train_batch_size: {batch} sequences cannot be split evenly over {shards} devices; "
            f"it could be {f'{below} or ' if below else ''}{above}"
        )
    per_device = batch // shards if config.per_device_parallelism == -1 else config.per_device_parallelism
    if (batch // shards) % per_device:
        fits = [n for n in range(1, batch // shards + 1) if (batch // shards) % n == 0]
        raise UserError(
            f"trainer.per_device_parallelism: each device has {batch // shards} sequences of the batch, which "
            f"{per_device} does not divide; it could be {', '.join(map(str, fits))}"
        )
    per_device_eval = per_device if config.per_device_eval_parallelism == -1 else config.per_device_eval_parallelism
    return Batching(batch, per_device_eval * shards, batch // shards // per_device)
