"""Settings of a training run: steps, batch, precision, evaluation, logs; and the sections of other rooms below it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, field_validator

from lmtrain.checkpoint.config import CheckpointerConfig, InitializationConfig
from lmtrain.config.base import Section, by_type
from lmtrain.config.suggest import nearest_divisors
from lmtrain.data.batch_sizes import BatchSizes
from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.run.precision import Precision, parse_precision
from lmtrain.runtime.config import DistributedConfig, RayConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.tracking.config import TrackerConfig, WandbConfig


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class BatchPhase(Section):
    """From step `start` on, batches have `value` sequences."""

    start: int = Field(ge=0, description="First step of this size, counted from 0")
    value: int = Field(ge=1, description="Sequences per update, over all devices")


class EmaConfig(Section):
    """An exponential moving average of the parameters."""

    type: Literal["ema"] = Field("ema", description="The kind of average")
    beta: float = Field(0.999, ge=0, lt=1, description="EMA decay factor of a step")


class EmaDecaySqrtConfig(Section):
    """An exponential moving average, then one that begins anew and moves less and less, as 1 - sqrt."""

    type: Literal["ema_decay_sqrt"] = Field("ema_decay_sqrt", description="The kind of average")
    beta: float = Field(0.999, ge=0, lt=1, description="EMA decay factor of a step, before switch_step")
    switch_step: int = Field(100_000, ge=0, description="Step from which the average moves as 1 - sqrt")
    decay_steps: int = Field(100_000, ge=1, description="Number of steps of the decay")
    epsilon: float = Field(1e-5, ge=0, lt=1, description="Minimum weight of an update")


AveragingConfig = Annotated[
    Annotated[EmaConfig, Tag("ema")] | Annotated[EmaDecaySqrtConfig, Tag("ema_decay_sqrt")],
    by_type("kind of average", "ema", ["ema", "ema_decay_sqrt"]),
]


class LoopConfig(Section):
    """The training loop."""

    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the parameters' initial values, dropout and shuffling")
    num_train_steps: int = Field(400_000, ge=1, lt=2**31, description="Optimizer updates in the whole run")
    train_batch_size: Annotated[int, Field(ge=1)] | Annotated[list[BatchPhase], Field(min_length=1)] = Field(
        32, description="Sequences per update, over all devices; or a list of {start: step, value: sequences}"
    )
    per_device_parallelism: int = Field(
        -1,
        description="Sequences a device computes at once, also written per_device_train_parallelism; the rest of the "
        "batch is accumulated. -1: train_batch_size * model_axis_size / devices, no accumulation. With dropout the "
        "number of parts is part of its random stream",
    )
    per_device_eval_parallelism: int = Field(
        -1, description="Sequences a device evaluates at once. -1: as per_device_parallelism"
    )
    mp: str = Field(
        "f32", description="Mixed-precision policy: f32, bf16, or p=f32,c=bfloat16 (parameters, computation)"
    )
    model_averaging: AveragingConfig | None = Field(
        None,
        description="Keep an average of the parameters too; it is evaluated beside them, exported and sampled from",
    )
    crash_on_nan: bool = Field(True, description="Stop when the loss is not a number, before anything is saved")
    crash_on_inf: bool = Field(True, description="Stop when the loss is infinite, before anything is saved")
    jax_compilation_cache_dir: str | None = Field(
        "~/.cache/lmtrain/jax", description="Folder of compiled programs, so that a restart compiles nothing; null: off"
    )

    xla_options: dict[str, bool | int | float | str | None] = Field(
        {},
        description="Options of XLA's compiler, over lmtrain's own for the platform; null takes one of these away. "
        "Other options may change results in their last bits",
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
            raise ValueError(f"phases begin at step 0 and ascend, but start at {starts}")
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
    """Norms of gradients and parameters, computed in the compiled step, in those steps that show them."""

    watch_targets: list[Literal["grads", "params", "updates"]] = Field(
        ["grads", "params"], description="What to take norms of, in total and by layer; []: nothing"
    )
    include_per_parameter_norms: bool = Field(False, description="Also the norm of each parameter: many metrics")
    split_scan_layers: bool = Field(True, description="One norm for each layer; false: stacked layers as one")
    interval: int = Field(10, ge=1, description="Show them every so many steps")


class ProfilerConfig(Section):
    """A trace of some steps, for TensorBoard, XProf and Perfetto, in `<log_dir>/<run_id>/profiler`."""

    start_step: int = Field(
        5, ge=1, description="Steps of this start before the trace begins: not the first, it compiles"
    )
    num_steps: int = Field(100, ge=1, description="Steps in the trace")


class LoggingConfig(Section):
    """Logs and trackers."""

    id: str | None = Field(None, description="Run id; null: RUN_ID, the W&B id, or made from the config")
    log_dir: str = Field("logs/", min_length=1, description="Folder of logs and metrics, named by the run id")
    tracker: Annotated[
        list[TrackerConfig], BeforeValidator(_as_list, json_schema_input_type=TrackerConfig | list[TrackerConfig])
    ] = Field(
        [WandbConfig()],
        description="One tracker or a list of them; type: wandb, tensorboard, trackio, json, noop, or where to import "
        "your own from: package.module.Class",
    )
    watch: WatchConfig = Field(default_factory=WatchConfig, description="Norms of gradients and parameters")
    profiler: bool | ProfilerConfig = Field(False, description="Write a trace of some steps; true: as by default")

    @property
    def profile(self) -> ProfilerConfig | None:
        """Which steps to trace, if any."""
        if isinstance(self.profiler, bool):
            return ProfilerConfig() if self.profiler else None
        return self.profiler


class TrainerConfig(
    InitializationConfig, PartitioningConfig, LoggingConfig, EvaluationConfig, LoopConfig
):  # the last comes first
    """How a run goes; what it learns from and with is in `data`, `model` and `optimizer`."""

    checkpointer: CheckpointerConfig = Field(default_factory=CheckpointerConfig, description="Saving and keeping")
    ray: RayConfig = Field(default_factory=RayConfig, description="Preprocessing on a Ray cluster")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="Processes of a run")


def num_microbatches(batch: int, per_device: int, shards: int = 1) -> int:
    """Into how many parts each of `shards` devices divides its share of a batch: `per_device` sequences each, or -1.

    Raises ValueError if it cannot. `shards` divides `batch`; while it is unknown, 1 finds what no number of devices can
    mend.
    """
    share = batch // shards
    if per_device == -1:
        return 1
    if share % per_device:
        near = " or ".join(map(str, nearest_divisors(share, per_device)))
        over = "" if shards == 1 else f" over {shards} devices, {share} sequences on each"
        raise ValueError(f"{per_device} does not divide trainer.train_batch_size {batch}{over}; it could be {near}")
    return share // per_device
