"""Settings of the optimizer and its learning-rate schedule; the cycles of a schedule."""

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictFloat, StrictInt, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lmtrain.config.section import RawText, Section, by_type, identity, tunable
from lmtrain.runtime.errors import counted, field_error


def _fraction_or_steps(value: Any) -> Any:
    if isinstance(value, float) and not 0 <= value <= 1:
        raise PydanticCustomError("fraction", "expected a fraction from 0.0 to 1.0, or a whole number of steps")
    if isinstance(value, int) and value < 0:
        raise PydanticCustomError("fraction", "expected a whole number of steps, 0 or more")
    return value


# An int is always a number of steps and a float always a fraction: `1` is one step, `1.0` is all steps.
FractionOrSteps = Annotated[StrictInt | StrictFloat, BeforeValidator(_fraction_or_steps)]
Steps = Annotated[StrictInt, Field(ge=1, lt=2**31)]

_WSD_DECAY = 0.2  # Haegele et al. 2024: longer decays gain little

Estimator = Literal["hutchinson", "gauss_newton_bartlett"]


class GroupConfig(Section):
    """Settings of some parameters that differ from the optimizer's."""

    match: RawText = tunable(description="Regular expression, matched at the start of the path (blocks/mlp/up/kernel)")
    learning_rate: float | None = tunable(
        None, gt=0, description="Peak learning rate, with the optimizer's schedule; null: the optimizer's"
    )
    weight_decay: float | None = tunable(
        None, ge=0, description="Weight decay, also of parameters that have none otherwise; null: as without the group"
    )
    beta1: float | None = tunable(None, ge=0, lt=1, description="Adam's first decay; null: the optimizer's")
    beta2: float | None = tunable(None, ge=0, lt=1, description="Adam's second decay; null: the optimizer's")
    initial_std: float | None = tunable(
        None,
        ge=0,
        description="Standard deviation of the initial values, of matrices and embeddings; 0: zeros; null: the model's",
    )

    @field_validator("match")
    @classmethod
    def _regular(cls, value: str) -> str:
        return _check_regex(value)

    @model_validator(mode="after")
    def _changes_something(self) -> "GroupConfig":
        if all(getattr(self, name) is None for name in type(self).model_fields if name != "match"):
            raise field_error("match", "the group has no other setting; add one, such as learning_rate")
        return self


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"invalid regular expression {pattern!r}: {error}") from None
    return pattern


class ScheduleConfig(Section):
    """Settings of all optimizers: learning-rate schedule, weight decay, groups of parameters."""

    # the estimator of the Hessian that an optimizer requires; None: none
    hessian: ClassVar[Estimator | None] = None
    # whether updates depend on complete matrices or on the curvature of all parameters, which LoRA does not have
    needs_full_matrices: ClassVar[bool] = False
    # moments as large as the parameters, and whether settings transfer between sizes (`lmtrain/transfer`)
    moments: ClassVar[int] = 2
    transfers: ClassVar[bool] = False
    # whether some parameters are updated by Adam
    has_adam: ClassVar[bool] = False

    learning_rate: float = tunable(1e-4, gt=0, description="Peak learning rate")
    weight_decay: float = tunable(0.0, ge=0, description="Decoupled weight decay, multiplied by the learning rate")
    weight_decay_modules: RawText | Annotated[list[RawText], Field(min_length=1)] | None = tunable(
        None,
        description="Parameters with weight decay: a regular expression, matched at the start of the path "
        "(blocks/mlp/up/kernel), or a list of texts that a path may contain; null: see default_weight_decay_mask",
    )
    default_weight_decay_mask: bool | None = tunable(
        None,
        description="Weight decay of all layers' matrices, but not of embeddings, norms and biases; true: in addition "
        "to weight_decay_modules; false: off (all parameters decay without them); null: on without them",
    )
    lr_schedule: Literal["constant", "linear", "cosine", "wsd", "inv_sqrt", "inv"] = tunable(
        "cosine", description="Shape of the learning-rate decay; wsd (warmup, stable, decay): linear, at the end only"
    )
    min_lr_ratio: float = tunable(0.1, ge=0, le=1, description="Final learning rate, as a fraction of the peak")
    warmup: FractionOrSteps = tunable(
        0.01, description="Linear warmup from 0: steps (int) or fraction of the first cycle (float)"
    )
    decay: FractionOrSteps | None = tunable(
        None,
        description="Decay at the end of each cycle: steps (int) or fraction of the cycle (float); "
        "null: all steps after the warmup, with wsd the last fifth of the cycle",
    )
    rewarmup: FractionOrSteps = tunable(
        0.0,
        description="Warm-up of later cycles, from the final rate of the previous one: steps (int) or fraction of the "
        "cycle (float)",
    )
    cycles: Steps | Annotated[list[Steps], Field(min_length=1)] | None = tunable(
        None, description="Number of cycles, or list of the steps where cycles end; null: one cycle"
    )
    cycle_length: FractionOrSteps | Annotated[list[Steps], Field(min_length=1)] | None = tunable(
        None, description="Length of a cycle: steps (int) or fraction of the run (float), or a list of lengths in steps"
    )
    groups: list[GroupConfig] = tunable(
        [], description="Parameters with other rates, weight decay or betas; the first group that matches one counts"
    )

    @field_validator("weight_decay_modules")
    @classmethod
    def _regular(cls, value: str | list[str] | None) -> str | list[str] | None:
        return _check_regex(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _groups_have_betas_of_adam(self) -> "ScheduleConfig":
        for group in [] if self.has_adam else self.groups:
            if group.beta1 is not None or group.beta2 is not None:
                raise field_error("groups", "beta1 and beta2 of a group require the optimizer adam or muon")
        return self

    @model_validator(mode="after")
    def _cycles_make_sense(self) -> "ScheduleConfig":
        if self.cycles is not None and self.cycle_length is not None:
            raise field_error("cycle_length", "set together with cycles; remove one of them")
        if isinstance(self.cycles, list) and any(later <= earlier for earlier, later in pairwise(self.cycles)):
            raise field_error("cycles", f"the steps where cycles end must increase, got {self.cycles}")
        if self.lr_schedule == "inv" and self.min_lr_ratio == 0:
            raise field_error("min_lr_ratio", "lr_schedule inv requires a value above 0")
        return self

    @property
    def decay_length(self) -> FractionOrSteps | None:
        """`decay`, or that of the schedule; None: all steps after the warmup."""
        return _WSD_DECAY if self.decay is None and self.lr_schedule == "wsd" else self.decay


class SkipStepConfig(Section):
    """Skip updates whose loss or gradient norm is far above those of the last steps."""

    rolling_interval_length: int = tunable(
        128, ge=2, le=1_000_000, description="Window of the rolling mean and standard deviation, in steps"
    )
    sigma_factor: float = tunable(6.0, gt=0, description="Threshold above the mean, in standard deviations")


class ClippedConfig(ScheduleConfig):
    """Settings of optimizers that clip gradients."""

    max_grad_norm: float | None = tunable(1.0, ge=0, description="Gradient clipping by global norm; null or 0: off")


class AdamConfig(ClippedConfig):
    """AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    transfers: ClassVar[bool] = True
    has_adam: ClassVar[bool] = True

    type: Literal["adam"] = identity("adam", description="Optimizer: AdamW")
    beta1: float = tunable(0.9, ge=0, lt=1, description="Decay of the first moment per step")
    beta2: float = tunable(0.95, ge=0, lt=1, description="Decay of the second moment per step")
    epsilon: float = tunable(1e-8, gt=0, description="Constant added to the root of the second moment")
    nesterov: bool = tunable(False, description="Nesterov momentum (Dozat 2016)")
    skip_bad_steps: StrictBool | Annotated[StrictInt, Field(ge=2, le=1_000_000)] | SkipStepConfig = tunable(
        False,
        description="Skip updates with an outlier loss or gradient norm: true, an int (rolling_interval_length), or a "
        "map with rolling_interval_length and sigma_factor",
    )

    @property
    def skip_step(self) -> SkipStepConfig | None:
        """`skip_bad_steps` as a `SkipStepConfig`; None: off."""
        if isinstance(self.skip_bad_steps, SkipStepConfig):
            return self.skip_bad_steps
        if isinstance(self.skip_bad_steps, bool):
            return SkipStepConfig() if self.skip_bad_steps else None
        return SkipStepConfig(rolling_interval_length=self.skip_bad_steps)


class SophiaConfig(ClippedConfig):
    """Sophia: momentum divided by an estimate of the Hessian's diagonal, with elementwise clipping."""

    needs_full_matrices: ClassVar[bool] = True

    beta1: float = tunable(0.96, ge=0, lt=1, description="Decay of the momentum per step")
    beta2: float = tunable(0.99, ge=0, lt=1, description="Decay of the Hessian estimate per estimate")
    epsilon: float = tunable(1e-12, gt=0, description="Minimum of the denominator")
    gamma: float = tunable(0.01, gt=0, description="Scale of the Hessian estimate")
    clip_threshold: float | None = tunable(1.0, gt=0, description="Elementwise clipping of updates; null: no clipping")
    update_interval: int = tunable(10, ge=1, lt=2**31, description="Interval of Hessian estimates, in steps")
    rng_seed: int = tunable(0, ge=0, lt=2**32, description="Random seed of the Hessian estimates")


class SophiaHConfig(SophiaConfig):
    """Sophia with Hutchinson's estimator (Liu et al. 2023)."""

    hessian: ClassVar[Estimator | None] = "hutchinson"

    type: Literal["sophia-h"] = identity("sophia-h", description="Optimizer: Sophia-H")


class SophiaGConfig(SophiaConfig):
    """Sophia with the Gauss-Newton-Bartlett estimator (Liu et al. 2023)."""

    hessian: ClassVar[Estimator | None] = "gauss_newton_bartlett"

    type: Literal["sophia-g"] = identity("sophia-g", description="Optimizer: Sophia-G")
    gamma: float = tunable(0.05, gt=0, description="Scale of the Hessian estimate")


class LionConfig(ClippedConfig):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023)."""

    moments: ClassVar[int] = 1
    transfers: ClassVar[bool] = True

    type: Literal["lion"] = identity("lion", description="Optimizer: Lion")
    beta1: float = tunable(0.95, ge=0, lt=1, description="Weight of the momentum in the update")
    beta2: float = tunable(0.98, ge=0, lt=1, description="Decay of the momentum per step")


class MuonConfig(ClippedConfig):
    """Muon: orthogonalized momentum for the blocks' matrices, Adam for other parameters (Jordan et al. 2024)."""

    needs_full_matrices: ClassVar[bool] = True
    transfers: ClassVar[bool] = True
    has_adam: ClassVar[bool] = True

    type: Literal["muon"] = identity("muon", description="Optimizer: Muon, with Adam for non-matrix parameters")
    learning_rate: float = tunable(0.02, gt=0, description="Peak learning rate of the blocks' matrices")
    adam_lr: float = tunable(6e-4, gt=0, description="Peak learning rate of Adam's parameters, with the same schedule")
    momentum: float = tunable(0.95, ge=0, lt=1, description="Decay of the momentum per step")
    nesterov: bool = tunable(True, description="Nesterov momentum")
    backend_steps: int = tunable(5, ge=1, le=20, description="Number of Newton-Schulz iterations")
    coefficients: tuple[float, float, float] = tunable(
        (3.4445, -4.7750, 2.0315),
        description="a, b, c of the iteration x <- a x + (b x x^T + c (x x^T)^2) x; the default is Jordan's, steepest "
        "at 0; [2, -1.5, 0.5] with backend_steps 12 converges to singular values of 1",
    )
    muon_epsilon: float = tunable(1e-8, gt=0, description="Constant added to the norm that divides a matrix")
    use_kimi_scaling: bool = tunable(
        False, description="Scale updates to match Adam's, by 0.2 * sqrt(larger dimension) (Liu et al. 2025)"
    )
    qk_clip: float | None = tunable(
        None,
        gt=0,
        description="QK-clip: after an update, scale down queries and keys of heads whose highest attention score in "
        "the batch was above this; 100 in Kimi K2. null: off",
    )
    beta1: float = tunable(0.9, ge=0, lt=1, description="Adam: decay of the first moment per step")
    beta2: float = tunable(0.95, ge=0, lt=1, description="Adam: decay of the second moment per step")
    epsilon: float = tunable(1e-8, gt=0, description="Adam: constant added to the root of the second moment")


class AdafactorConfig(ScheduleConfig):
    """Adafactor: second moments factored into row and column means (Shazeer and Stern 2018)."""

    moments: ClassVar[int] = 0

    type: Literal["adafactor"] = identity("adafactor", description="Optimizer: Adafactor")
    learning_rate: float = tunable(1e-2, gt=0, description="Peak learning rate")
    decay_rate: float = tunable(
        0.8, gt=0, le=1, description="Second-moment decay exponent: 1 - t^-decay_rate at step t"
    )
    epsilon: float = tunable(1e-30, gt=0, description="Constant added to squared gradients")
    clipping_threshold: float | None = tunable(
        1.0, ge=1, description="Update clipping by root mean square, per parameter; null: no clipping"
    )
    multiply_by_parameter_scale: bool = tunable(
        True, description="Scale each update by its parameter's root mean square"
    )
    momentum: float | None = tunable(
        None, ge=0, lt=1, description="Decay of the first moment per step; null: no momentum"
    )
    min_dim_size_to_factor: int = tunable(
        128, ge=2, description="Minimum dimension of a matrix for a factored second moment"
    )


OptimizerConfig = Annotated[
    Annotated[AdamConfig, Tag("adam")]
    | Annotated[SophiaHConfig, Tag("sophia-h")]
    | Annotated[SophiaGConfig, Tag("sophia-g")]
    | Annotated[LionConfig, Tag("lion")]
    | Annotated[MuonConfig, Tag("muon")]
    | Annotated[AdafactorConfig, Tag("adafactor")],
    by_type("adam"),
]


# Cycles of the learning rate, in integer steps. Plain arithmetic without JAX.
#
# {[warmup or rewarmup] -> [stable] -> [decay]} x number of cycles

_MAX_CYCLES = 10_000


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """Steps `start <= step < end`: `warmup` steps, then steps at the peak rate, then `decay` steps."""

    start: int
    end: int
    warmup: int
    decay: int


def num_steps(length: FractionOrSteps, total: int) -> int:
    """Convert a length to steps: an int is a number of steps, a float is a fraction of `total`, rounded down."""
    return length if isinstance(length, int) else int(length * total)


def build_cycles(config: ScheduleConfig, num_train_steps: int) -> list[Cycle]:
    """The cycles of a run, which cover all its steps. Fractions in `warmup` and `decay` refer to one cycle.

    Raises a field error for lengths that do not fit.
    """
    points = [0, *_ends(config, num_train_steps)]
    return [_cycle(config, index, start, end) for index, (start, end) in enumerate(pairwise(points))]


def _ends(config: ScheduleConfig, total: int) -> list[int]:
    """The end step of each cycle; the last one is `total`."""
    cycles, length = config.cycles, config.cycle_length
    each = num_steps(length, total) if isinstance(length, int | float) else None
    number = total // each if each else cycles if isinstance(cycles, int) else 1
    if number > _MAX_CYCLES:
        name = "cycles" if length is None else "cycle_length"
        raise field_error(name, f"{number:,} cycles; expected at most {_MAX_CYCLES:,}")
    if isinstance(cycles, int):
        if cycles > total:
            raise field_error("cycles", f"{cycles} cycles do not fit into {counted(total, 'step')}")
        return [total * (index + 1) // cycles for index in range(cycles)]
    if cycles is not None:
        if cycles[-1] > total:
            raise field_error("cycles", f"step {cycles[-1]} is after the end of the run (step {total})")
        ends = cycles
    elif isinstance(length, list):
        ends = list(accumulate(length))
        if ends[-1] > total:
            lengths = counted(ends[-1], "step")
            raise field_error("cycle_length", f"the cycles have {lengths} in total, the run has only {total}")
    elif length is not None:
        steps = num_steps(length, total)
        if steps < 1:
            raise field_error("cycle_length", f"{length} of {counted(total, 'step')} is less than one step")
        # if the length does not divide the run, the last cycle includes the remaining steps
        ends = [steps * index for index in range(1, total // steps)]
    else:
        ends = []
    return ends if ends and ends[-1] == total else [*ends, total]


def _cycle(config: ScheduleConfig, index: int, start: int, end: int) -> Cycle:
    length = end - start
    has_cycles = config.cycles is not None or config.cycle_length is not None
    where = f"cycle {index + 1} (steps {start} to {end})" if has_cycles else f"the run ({counted(length, 'step')})"
    name = "rewarmup" if index else "warmup"
    warmup = num_steps(config.rewarmup if index else config.warmup, length)
    if warmup > length:
        raise field_error(name, f"{counted(warmup, 'step')}, longer than {where}")
    if config.decay_length is None:
        return Cycle(start=start, end=end, warmup=warmup, decay=length - warmup)
    decay = num_steps(config.decay_length, length)
    if decay < 1 and config.lr_schedule != "constant":
        raise field_error(
            "decay", f"{config.decay_length} is less than one step; for no decay set lr_schedule: constant"
        )
    if warmup + decay > length:
        raise field_error("decay", f"{counted(decay, 'step')}, with {warmup:,} of {name}, longer than {where}")
    return Cycle(start=start, end=end, warmup=warmup, decay=decay)
