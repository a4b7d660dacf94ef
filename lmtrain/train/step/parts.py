"""Optional parts of a training step. A run has those that its settings ask for, and each changes the step at one point.
Their order does not matter, since no two change the same value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax

from lmtrain.models.attention.attend import SCORES
from lmtrain.models.interface import MAIN, LanguageModel, outputs_of
from lmtrain.models.layers.quantized import QUANTIZED
from lmtrain.models.moe.grouped import supports
from lmtrain.models.moe.load import balanced
from lmtrain.models.params import copies
from lmtrain.objectives.distillation import TAUGHT
from lmtrain.objectives.interface import Loss
from lmtrain.train.step.hessian import estimate_hessian
from lmtrain.train.step.norms import Watch
from lmtrain.train.step.state import TEACHER, Averaging, TrainState, move_average


class Work(NamedTuple):
    """What a step computes with: the main loss, parameters in the compute dtype, the batch, the key of its random
    numbers."""

    model: LanguageModel
    loss: Loss
    params: Any
    batch: Any
    key: jax.Array
    num_microbatches: int


class StepPart:
    """The points of a step that parts change, in its order. By default, a part changes nothing there."""

    def collections(self, params: Any) -> dict[str, Any]:
        """Collections of variables besides the parameters, from the model's matrices in the compute dtype; once."""
        return {}

    def inputs(self, state: TrainState, batch: Any) -> dict[str, Any]:
        """What the objective gets in addition, for each microbatch."""
        return {}

    # collections of what the model sows, besides those that every step reads
    sown: ClassVar[tuple[str, ...]] = ()

    def arguments(self, work: Work, scores: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Further arguments of the optimizer, given the highest scores of attention by layer and head, if sown."""
        return {}

    def updates(self, updates: Any, load: Mapping[str, jax.Array]) -> Any:
        """The updates, given the load of experts by router."""
        return updates

    def after(self, state: TrainState, gradients: Any, updates: Any) -> tuple[TrainState, dict[str, Any]]:
        """The state after the update, and further metrics."""
        return state, {}


@dataclass(frozen=True)
class EightBitCopies(StepPart):
    """Products of the blocks in an 8-bit format: the matrices are copied to it once, for all microbatches."""

    products: str

    def collections(self, params: Any) -> dict[str, Any]:
        return {QUANTIZED: copies(params, self.products, supports(self.products))}


@dataclass(frozen=True)
class Taught(StepPart):
    """The main output of a frozen teacher, for distillation."""

    teacher: LanguageModel

    def inputs(self, state: TrainState, batch: Any) -> dict[str, Any]:
        return {TAUGHT: self.teacher.apply({"params": state.frozen[TEACHER]}, batch, True, method=outputs_of)[MAIN]}


@dataclass(frozen=True)
class HessianEstimate(StepPart):
    """An estimate of the Hessian's diagonal, by a method of `hessian.py`, which Sophia computes when it needs it."""

    method: str

    def arguments(self, work: Work, scores: Mapping[str, jax.Array]) -> dict[str, Any]:
        return {"hessian": lambda key: estimate_hessian(self.method, *work._replace(key=key))}


@dataclass(frozen=True)
class HighestScores(StepPart):
    """The highest scores of attention, for an optimizer that keeps them below a threshold."""

    sown: ClassVar[tuple[str, ...]] = (SCORES,)

    def arguments(self, work: Work, scores: Mapping[str, jax.Array]) -> dict[str, Any]:
        return {"scores": scores}


@dataclass(frozen=True)
class Balance(StepPart):
    """Updates of the biases that balance the load of experts, at a rate."""

    rate: float

    def updates(self, updates: Any, load: Mapping[str, jax.Array]) -> Any:
        return balanced(updates, load, self.rate)


@dataclass(frozen=True)
class Average(StepPart):
    """The average of the parameters."""

    share: Averaging

    def after(self, state: TrainState, gradients: Any, updates: Any) -> tuple[TrainState, dict[str, Any]]:
        average = move_average(state.ema_params, state.params, self.share(state.step))
        return state.replace(ema_params=average), {}


@dataclass(frozen=True)
class Norms(StepPart):
    """Norms of gradients, parameters and updates."""

    watch: Watch

    def after(self, state: TrainState, gradients: Any, updates: Any) -> tuple[TrainState, dict[str, Any]]:
        trees = {"grads": gradients, "params": state.params, "updates": updates}
        return state, self.watch.on_device(state.step, trees)


def choose_parts(
    *,
    products: str | None = None,
    teacher: LanguageModel | None = None,
    hessian: str | None = None,
    qk_clip: float | None = None,
    balance_rate: float | None = None,
    averaging: Averaging | None = None,
    watch: Watch | None = None,
) -> tuple[StepPart, ...]:
    """The parts of a step with these features; None: without."""
    chosen: list[tuple[Callable[[Any], StepPart], Any]] = [
        (EightBitCopies, products),
        (Taught, teacher),
        (HessianEstimate, hessian),
        (lambda _: HighestScores(), qk_clip),
        (Balance, balance_rate),
        (Average, averaging),
        (Norms, watch),
    ]
    return tuple(part(setting) for part, setting in chosen if setting is not None)
