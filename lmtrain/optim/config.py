"""Settings of the optimizer and its learning-rate schedule."""

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt, Tag, model_validator
from pydantic_core import PydanticCustomError

from lmtrain.config.base import Section, by_type, planned
from lmtrain.config.errors import field_error


def _fraction_or_steps(value: Any) -> Any:
    if isinstance(value, float) and not 0 <= value <= 1:
        raise PydanticCustomError("fraction", "expected a fraction from 0.0 to 1.0, or a whole number of steps")
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("fraction", "expected a whole number of steps, 0 or more")
    return value


# An int is always a number of steps and a float always a fraction: `1` is one step, `1.0` all of them.
FractionOrSteps = Annotated[StrictInt | StrictFloat, BeforeValidator(_fraction_or_steps)]
Steps = Annotated[StrictInt, Field(ge=1)]


class ScheduleConfig(Section):
    """What all optimizers have in common: the learning rate over time, and weight decay."""

    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, applied to matrices only")
    lr_schedule: Literal["constant", "linear", "cosine", "inv_sqrt", "inv"] = Field(
        "cosine", description="Shape of the decay"
    )
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a share of the peak")
    warmup: FractionOrSteps = Field(
        0.01, description="Linear warmup from 0: steps (int) or fraction of the first cycle (float)"
    )
    decay: FractionOrSteps | None = Field(
        None, description="Decay at the end of each cycle: steps (int) or fraction (float); null: all after warmup"
    )
    rewarmup: FractionOrSteps = Field(
        0.0, description="Warmup of later cycles, from where the last one ended: steps (int) or fraction (float)"
    )
    cycles: Steps | Annotated[list[Steps], Field(min_length=1)] | None = Field(
        None, description="Number of cycles, or the steps where cycles end; null: one cycle"
    )
    cycle_length: FractionOrSteps | Annotated[list[Steps], Field(min_length=1)] | None = Field(
        None, description="Length of a cycle: steps (int) or fraction of the run (float), or a list of lengths in steps"
    )

    @model_validator(mode="after")
    def _cycles_make_sense(self) -> "ScheduleConfig":
        if self.cycles is not None and self.cycle_length is not None:
            raise field_error("cycle_length", "set together with cycles, which says the same; remove one")
        if isinstance(self.cycles, list) and any(later <= earlier for earlier, later in pairwise(self.cycles)):
            raise field_error("cycles", f"the steps where cycles end must grow, but are {self.cycles}")
        if self.lr_schedule == "inv" and self.min_lr_ratio == 0:
            raise field_error("min_lr_ratio", "lr_schedule inv never reaches 0; set a ratio above it")
        return self


class SkipStepConfig(Section):
    """Leave out updates whose loss or gradient norm is far above those of the last steps."""

    rolling_interval_length: int = Field(128, ge=2, description="Steps that mean and deviation are taken over")
    sigma_factor: float = Field(6.0, gt=0, description="Skip above the mean plus so many standard deviations")


class AdamConfig(ScheduleConfig):
    """AdamW: Adam with decoupled weight decay."""

    type: Literal["adam"] = Field("adam", description="The optimizer")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment")
    max_grad_norm: float | None = Field(1.0, ge=0, description="Clip gradients to this global norm; null or 0: off")
    skip_bad_steps: bool | SkipStepConfig = planned(
        False, description="Skip updates far out of line: true, or a map of rolling_interval_length and sigma_factor"
    )


class SophiaConfig(ScheduleConfig):
    """Sophia: momentum divided by an estimate of the Hessian's diagonal, clipped element by element."""

    is_planned: ClassVar[bool] = True

    beta1: float = Field(0.96, ge=0, lt=1, description="Decay of the momentum")
    beta2: float = Field(0.99, ge=0, lt=1, description="Decay of the Hessian estimate")
    epsilon: float = Field(1e-12, gt=0, description="Least denominator")
    gamma: float = Field(0.01, gt=0, description="Scale of the Hessian estimate")
    clip_threshold: float | None = Field(1.0, gt=0, description="Largest element of an update; null: no clipping")
    update_interval: int = Field(10, ge=1, description="Steps from one Hessian estimate to the next")
    rng_seed: int = Field(0, ge=0, lt=2**32, description="Seed of the Hessian estimate")


class SophiaHConfig(SophiaConfig):
    """Sophia with Hutchinson's estimator (Liu et al. 2023)."""

    type: Literal["sophia-h"] = Field("sophia-h", description="The optimizer")


class SophiaGConfig(SophiaConfig):
    """Sophia with the Gauss-Newton-Bartlett estimator (Liu et al. 2023)."""

    type: Literal["sophia-g"] = Field("sophia-g", description="The optimizer")


OptimizerConfig = Annotated[
    Annotated[AdamConfig, Tag("adam")]
    | Annotated[SophiaHConfig, Tag("sophia-h")]
    | Annotated[SophiaGConfig, Tag("sophia-g")],
    by_type("optimizer", "adam", ["adam", "sophia-h", "sophia-g"]),
]
