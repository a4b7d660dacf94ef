"""Preferences on validation sets: the objective's loss, and how often the chosen answer has the higher reward."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.eval_step import build_forward_step, read_ahead
from lmtrain.evaluation.interface import Context
from lmtrain.models.interface import Outputs
from lmtrain.objectives.interface import Loss
from lmtrain.objectives.preferences import Preferences
from lmtrain.sharding.mesh import MeshFunction


class PreferenceEvaluator:
    """Means over the pairs of all validation sets, of a run with an objective that compares answers."""

    name = "preferences"
    optional = False

    def __init__(self, every: int | None):
        self.every = every

    def prepare(self, context: Context) -> bool:
        self._context = context
        if not isinstance(context.loss, Preferences) or not context.sets:
            return False
        self._step = _build_step(context, context.loss)
        return True

    def evaluate(self, params: Any, step: int) -> dict[str, float]:
        """`loss`, and what the objective logs, such as `rewards/accuracies`."""
        sums: Counter[str] = Counter()
        between = self._context.between_batches("batches of pairs")
        for batches in self._context.sets.values():
            for result in read_ahead(self._step, params, batches, between):
                sums.update({name: float(value) for name, value in result.items()})
        pairs = sums.pop("pairs")
        return {name: value / max(pairs, 1) for name, value in sums.items()}

    def describe(self, metrics: Mapping[str, float]) -> str:
        loss, accuracy = metrics["eval/preferences/loss"], metrics["eval/preferences/rewards/accuracies"]
        margin = metrics["eval/preferences/rewards/margins"]
        return f"preferences: loss {loss:.4f}, {100 * accuracy:.1f} % of pairs right, margin {margin:.3f}"


def build(config: EvaluationConfig) -> PreferenceEvaluator | None:
    """The evaluator of a run that evaluates."""
    return None if config.steps_per_eval is None else PreferenceEvaluator(config.steps_per_eval)


def _build_step(context: Context, main: Loss) -> MeshFunction:
    """The jitted (params, batch) -> sums over the pairs of a batch by name, and their number."""

    def evaluate(outputs: Outputs, batch: Any) -> dict[str, jax.Array]:
        terms = main.loss_sum(outputs, batch)
        return {"pairs": main.weights(batch).sum(), "loss": terms.total, **terms.logged}

    return build_forward_step(context.model, context.layout, context.compute_dtype, evaluate, context.xla_options)
