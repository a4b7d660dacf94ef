"""Settings of a training run: steps, batch, precision, mesh, evaluation, logs."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.config.base import Section
from lmtrain.sharding.axes import PARAMETER_AXES
from lmtrain.tracking.config import TrackerConfig, WandbConfig
from lmtrain.train.precision import Precision, parse_precision


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class TrainerConfig(Section):
    """How a run goes; what it learns from and with is in `data`, `model` and `optimizer`."""

    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the parameters' initial values and of dropout")
    num_train_steps: int = Field(400_000, ge=1, lt=2**31, description="Optimizer updates in the whole run")
    train_batch_size: int = Field(32, ge=1, description="Sequences per update, over all devices")
    per_device_parallelism: int = Field(
        -1, description="Sequences a device computes at once; the rest is accumulated. -1: all, no accumulation"
    )
    per_device_eval_parallelism: int = Field(
        -1, description="Sequences a device evaluates at once. -1: as per_device_parallelism"
    )
    steps_per_eval: int = Field(1000, ge=1, description="Evaluate every so many steps, and after the last")
    max_eval_batches: int | None = Field(None, ge=1, description="Batches per evaluation; null: the whole set")
    mp: str = Field("f32", description="Number formats: f32, bf16, or p=f32,c=bfloat16 (parameters, computation)")
    log_dir: str = Field("logs/", min_length=1, description="Folder of logs and metrics, named by the run id")
    id: str | None = Field(None, description="Run id; null: RUN_ID, the W&B id, or made from the config")
    tracker: Annotated[list[TrackerConfig], BeforeValidator(_as_list)] = Field(
        [WandbConfig()], description="One tracker or a list of them; type: wandb, tensorboard, json or noop"
    )
    checkpointer: CheckpointerConfig = Field(default_factory=CheckpointerConfig, description="Saving and keeping")
    batch_axis: str = Field("batch", description="Logical axis split over the replica and data axes of the mesh")
    fsdp_axis: str | list[str] | None = Field("embed", description="Axes of parameters split over the data axis")
    tensor_parallel_axes: list[str] | None = Field(None, description="Logical axes split over the model axis")
    model_axis_size: int = Field(1, ge=1, description="Devices of the model axis (tensor parallelism)")
    crash_on_nan: bool = Field(True, description="Stop when the loss is not a number, before anything is saved")
    crash_on_inf: bool = Field(True, description="Stop when the loss is infinite, before anything is saved")
    jax_compilation_cache_dir: str | None = Field(
        "~/.cache/lmtrain/jax", description="Folder of compiled programs, so that a restart compiles nothing; null: off"
    )

    @field_validator("per_device_parallelism", "per_device_eval_parallelism")
    @classmethod
    def _positive_or_auto(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("expected -1 (automatic), or 1 or more")
        return value

    @field_validator("fsdp_axis", "tensor_parallel_axes")
    @classmethod
    def _known_axes(cls, value: str | list[str] | None) -> str | list[str] | None:
        for axis in [value] if isinstance(value, str) else value or []:
            if axis not in PARAMETER_AXES:
                raise ValueError(f"no logical axis {axis!r}; one of {', '.join(PARAMETER_AXES)}")
        return value

    @model_validator(mode="after")
    def _axis_split_once(self) -> "TrainerConfig":
        fsdp = [self.fsdp_axis] if isinstance(self.fsdp_axis, str) else self.fsdp_axis or []
        both = sorted(set(fsdp) & set(self.tensor_parallel_axes or []))
        if both:
            raise ValueError(
                f"fsdp_axis and tensor_parallel_axes both name {both[0]!r}, which can be split over one mesh axis only"
            )
        return self

    @field_validator("batch_axis")
    @classmethod
    def _batch_is_batch(cls, value: str) -> str:
        if value != "batch":
            raise ValueError(f"only 'batch' is an axis of the data, not {value!r}")
        return value

    @field_validator("mp")
    @classmethod
    def _known_precision(cls, value: str) -> str:
        parse_precision(value)
        return value

    @property
    def precision(self) -> Precision:
        return parse_precision(self.mp)
