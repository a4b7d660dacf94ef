"""Division of a batch over devices and into microbatches."""

from collections.abc import Mapping
from dataclasses import dataclass

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.config.suggest import nearest_divisors
from lmtrain.run.trainer import TrainerConfig, num_microbatches


@dataclass(frozen=True)
class Batching:
    """Training batch size -> number of microbatches, and the evaluation batch size; sizes are in sequences."""

    num_microbatches: Mapping[int, int]
    eval_batch: int


def check_seq_len(seq_len: int, parts: int, halves: bool = False) -> None:
    """Raise `UserError` if sequences cannot be split over `parts` devices, with `halves` in two parts each."""
    if halves and seq_len % parts == 0 and seq_len % (2 * parts):
        raise UserError(
            f"model.seq_len: {seq_len:,} positions over {parts} devices, which do not divide the attention heads, are "
            f"split into {2 * parts} parts: use a multiple of that, or another trainer.context_axis_size"
        )
    if seq_len % parts:
        near = " or ".join(map(str, nearest_divisors(seq_len, parts)))
        raise UserError(
            f"model.seq_len: {counted(seq_len, 'position')} cannot be split evenly over {parts} devices "
            f"(trainer.context_axis_size); it divides over {near} devices"
        )


def choose_batching(config: TrainerConfig, shards: int) -> Batching:
    """Divide batches over `shards` parts of the mesh. Raises `UserError` with valid sizes."""
    microbatches = {batch: _microbatches(config, batch, shards) for batch in config.batch_sizes.all}
    largest = max(batch // shards // number for batch, number in microbatches.items())
    per_device_eval = largest if config.per_device_eval_parallelism == -1 else config.per_device_eval_parallelism
    return Batching(microbatches, per_device_eval * shards)


def _microbatches(config: TrainerConfig, batch: int, shards: int) -> int:
    if batch % shards:
        below, above = batch // shards * shards, -(-batch // shards) * shards
        raise UserError(
            f"trainer.train_batch_size: {counted(batch, 'sequence')} cannot be split evenly over {shards} devices; "
            f"it could be {f'{below} or ' if below else ''}{above}"
        )
    try:
        return num_microbatches(batch, config.per_device_parallelism, shards)
    except ValueError as error:
        raise UserError(f"trainer.per_device_parallelism: {error}") from None
