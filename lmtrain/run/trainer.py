"""Settings of a training run: steps, batch, precision, evaluation, logs; nested sections of other packages; and the
division of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, field_validator

from lmtrain.checkpoint.config import CheckpointerConfig, InitializationConfig
from lmtrain.config.section import RunPath, Section, by_type, changeable, execution, identity
from lmtrain.data.config import BatchSizes
from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.run.execution import DistributedConfig, Precision, RayConfig, parse_precision
from lmtrain.runtime.errors import UserError, counted, nearest_divisors
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.tracking.config import TrackerConfig, WandbConfig

# In sequences; larger batches are mistakes.
_MAX_BATCH = 2**24
_BatchSize = Annotated[int, Field(ge=1, le=_MAX_BATCH)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class BatchPhase(Section):
    """Batch size from step `start` on."""

    start: int = identity(ge=0, description="First step with this batch size, counted from 0")
    value: int = identity(ge=1, le=_MAX_BATCH, description="Batch size: sequences per update, over all devices")


class EmaConfig(Section):
    """Exponential moving average (EMA) of the parameters."""

    type: Literal["ema"] = changeable("ema", description="Kind of average")
    beta: float = changeable(0.999, ge=0, lt=1, description="EMA decay per step")


class EmaDecaySqrtConfig(Section):
    """EMA of the parameters until switch_step, then restarted with an update weight that decays as 1 - sqrt."""

    type: Literal["ema_decay_sqrt"] = changeable("ema_decay_sqrt", description="Kind of average")
    beta: float = changeable(0.999, ge=0, lt=1, description="EMA decay per step, before switch_step")
    switch_step: int = changeable(
        100_000, ge=0, lt=2**31, description="First step of the 1 - sqrt decay, at which the average restarts"
    )
    decay_steps: int = changeable(100_000, ge=1, lt=2**31, description="Length of the 1 - sqrt decay, in steps")
    epsilon: float = changeable(1e-5, ge=0, lt=1, description="Minimum weight of an update in the average")


AveragingConfig = Annotated[
    Annotated[EmaConfig, Tag("ema")] | Annotated[EmaDecaySqrtConfig, Tag("ema_decay_sqrt")], by_type("ema")
]


class LoopConfig(Section):
    """The training loop."""

    seed: int = identity(0, ge=0, lt=2**32, description="Seed of parameter initialization, dropout and data shuffling")
    num_train_steps: int = changeable(400_000, ge=1, lt=2**31, description="Number of optimizer updates in the run")
    train_batch_size: _BatchSize | Annotated[list[BatchPhase], Field(min_length=1)] = identity(
        32,
        description="Batch size: sequences per update, over all devices; or a list of {start: step, value: sequences}",
    )
    per_device_parallelism: int = execution(
        -1,
        description="Microbatch size: sequences at once per device, or per group of model_axis_size * "
        "context_axis_size devices that share them, with gradient accumulation over the rest of the batch; -1: no "
        "accumulation. Alias per_device_train_parallelism. Changes the random numbers of dropout",
    )
    per_device_eval_parallelism: int = execution(
        -1, description="Evaluation batch size: sequences at once, counted as in per_device_parallelism. -1: the same"
    )
    mp: str = changeable(
        "f32",
        description="Mixed-precision policy: f32, bf16, or p=f32,c=bfloat16 (parameters, computation). q=fp8 or q=int8 "
        "computes the products of the blocks in 8 bits",
    )
    allow_slow_products: bool = execution(
        False,
        description="Accept q of mp on devices where 8-bit products save hardly any time, such as int8 on TPU v6e",
    )
    model_averaging: AveragingConfig | None = changeable(
        None,
        description="Moving average of the parameters, which is also evaluated, and used for export and sampling; "
        "null: off",
    )
    crash_on_nan: bool = changeable(True, description="Stop with an error when the loss is NaN, before a save")
    crash_on_inf: bool = changeable(True, description="Stop with an error when the loss is infinite, before a save")
    jax_compilation_cache_dir: str | None = execution(
        "~/.cache/lmtrain/jax", description="Compilation cache folder: a restart loads compiled programs; null: off"
    )

    xla_options: dict[str, bool | int | float | str | None] = execution(
        {},
        description="XLA compiler options, added to lmtrain's defaults for the platform; null removes a default. "
        "They may change the last bits of results",
    )

    @field_validator("per_device_parallelism", "per_device_eval_parallelism")
    @classmethod
    def _positive_or_auto(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("expected -1 (automatic), or 1 or more")
        return value

    @field_validator("train_batch_size")
    @classmethod
    def _phases_ascend(cls, value: int | list[BatchPhase]) -> int | list[BatchPhase]:
        starts = [0] if isinstance(value, int) else [phase.start for phase in value]
        if starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"start must be 0 in the first phase and increase, got {starts}")
        return value

    @field_validator("mp")
    @classmethod
    def _known_precision(cls, value: str) -> str:
        parse_precision(value)
        return value

    @property
    def batch_sizes(self) -> BatchSizes:
        size = self.train_batch_size
        return BatchSizes.of(size if isinstance(size, int) else [(phase.start, phase.value) for phase in size])

    @property
    def precision(self) -> Precision:
        return parse_precision(self.mp)


class WatchConfig(Section):
    """Norms of gradients and parameters, computed in the compiled step whenever they are logged."""

    watch_targets: list[Literal["grads", "params", "updates"]] = changeable(
        ["grads", "params"], description="Trees to log norms of, in total and by layer; []: none"
    )
    include_per_parameter_norms: bool = changeable(
        False, description="Also log the norm of each parameter (many metrics)"
    )
    split_scan_layers: bool = changeable(
        True, description="Log one norm per layer; false: one norm over stacked layers"
    )
    interval: int = changeable(10, ge=1, description="Logging interval of the norms, in steps")


class ProfilerConfig(Section):
    """Profiler trace of a few steps, for TensorBoard, XProf and Perfetto, in `<log_dir>/<run_id>/profiler`."""

    start_step: int = changeable(
        5, ge=1, description="Number of steps of this process before the trace; at least 1, because the first compiles"
    )
    num_steps: int = changeable(100, ge=1, description="Number of steps in the trace")


class LoggingConfig(Section):
    """Logs and trackers."""

    id: str | None = changeable(
        None, description="Run id; null: RUN_ID, else the W&B id, else generated from the config"
    )
    log_dir: RunPath = changeable(
        "logs/", min_length=1, description="Log folder; files in it are named after the run id"
    )
    tracker: Annotated[
        list[TrackerConfig], BeforeValidator(_as_list, json_schema_input_type=TrackerConfig | list[TrackerConfig])
    ] = changeable(
        [WandbConfig()],
        description="Tracker or list of trackers; type: wandb, tensorboard, trackio, json, noop, or the import path "
        "package.module.Class of a custom tracker",
    )
    watch: WatchConfig = changeable(default_factory=WatchConfig, description="Logging of gradient and parameter norms")
    profiler: bool | ProfilerConfig = changeable(
        False, description="Profiler trace of a few steps; true: default settings"
    )

    @property
    def profile(self) -> ProfilerConfig | None:
        """Which steps to trace, if any."""
        if isinstance(self.profiler, bool):
            return ProfilerConfig() if self.profiler else None
        return self.profiler


class TrainerConfig(
    InitializationConfig, PartitioningConfig, LoggingConfig, EvaluationConfig, LoopConfig
):  # in descriptions, the fields of the last base class come first
    """Execution of a run; data, model and optimizer have separate sections."""

    checkpointer: CheckpointerConfig = changeable(
        default_factory=CheckpointerConfig, description="Saving of checkpoints"
    )
    ray: RayConfig = execution(default_factory=RayConfig, description="Preprocessing on a Ray cluster")
    distributed: DistributedConfig = execution(default_factory=DistributedConfig, description="Processes of a run")


def num_microbatches(batch: int, per_device: int, shards: int = 1) -> int:
    """Number of microbatches, of `per_device` sequences each (-1: one microbatch), on each of `shards` devices.

    Raises ValueError if the size does not divide. `shards` divides `batch`; pass 1 while it is unknown, to find errors
    that no number of devices can fix.
    """
    share = batch // shards
    if per_device == -1:
        return 1
    if share % per_device:
        near = " or ".join(map(str, nearest_divisors(share, per_device)))
        over = "" if shards == 1 else f" over {shards} devices, {share} sequences on each"
        raise ValueError(f"{per_device} does not divide trainer.train_batch_size {batch}{over}; it could be {near}")
    return share // per_device


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
