"""Settings of the optimizer and its learning-rate schedule."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt
from pydantic_core import PydanticCustomError

from lmtrain.config.base import Section


def _fraction_or_steps(value: Any) -> Any:
    if isinstance(value, float) and not 0 <= value <= 1:
        raise PydanticCustomError("fraction", "expected a fraction from 0.0 to 1.0, or a whole number of steps")
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("fraction", "expected a whole number of steps, 0 or more")
    return value


# An int is always a number of steps and a float always a fraction of the run: `1` is one step, `1.0` all of them.
FractionOrSteps = Annotated[StrictInt | StrictFloat, BeforeValidator(_fraction_or_steps)]


class AdamConfig(Section):
    """AdamW: Adam with decoupled weight decay."""

    type: Literal["adam"] = Field("adam", description="The optimizer")
    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay, applied to matrices only")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Learning rate at the end, as a share of the peak")
    warmup: FractionOrSteps = Field(
        0.01, description="Linear warmup from 0: steps (int) or fraction of the run (float)"
    )
    decay: FractionOrSteps | None = Field(
        None, description="Length of the decay at the end: steps (int) or fraction (float); null: all after warmup"
    )
    lr_schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape of the decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment")
    max_grad_norm: float | None = Field(1.0, ge=0, description="Clip gradients to this global norm; null or 0: off")


OptimizerConfig = AdamConfig
