"""Running evaluations: when they are due, with which parameters, and under which metric names."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.evaluation.interface import Context, Evaluator
from lmtrain.runtime.logging import log
from lmtrain.runtime.signals import StoppedError

# Part of metric names of averaged parameters, between `eval` and the evaluator's name.
AVERAGED = "ema"


class Evaluations:
    """The evaluators of a run that have something to evaluate.

    Raises `UserError` if an evaluator has the name of a validation set, so metric names would clash.
    """

    def __init__(self, evaluators: Sequence[Evaluator], context: Context):
        for evaluator in evaluators:
            if evaluator.name in context.sets and evaluator.name:
                raise UserError(
                    f"data.configs: {evaluator.name} is the name of a source and of an evaluation, so metrics of both "
                    "would have the same names; rename the source"
                )
        self._evaluators = [evaluator for evaluator in evaluators if self._prepares(evaluator, context)]

    def due(self, step: int, last: int) -> list[Evaluator]:
        """The evaluators that run after `step` updates; after the `last` step, all."""
        return [one for one in self._evaluators if step == last or (one.every and step % one.every == 0)]

    def next_after(self, step: int, last: int) -> int | None:
        """The next step after `step` with a due evaluation; None if there is none."""
        if not self._evaluators or step >= last:
            return None
        return min(last, *(step // one.every * one.every + one.every for one in self._evaluators if one.every), last)

    def run(
        self, due: Sequence[Evaluator], params: Any, ema_params: Any, step: int
    ) -> tuple[dict[str, float], list[str]]:
        """All metrics, and a log line for each evaluator; also for `ema_params` unless None.

        Raises `StoppedError` if the run has to stop; then nothing of this step counts as evaluated.
        """
        metrics: dict[str, float] = {}
        lines = []
        for evaluator in due:
            try:
                found = self._named(evaluator, "eval", evaluator.evaluate(params, step))
                if ema_params is not None:
                    found |= self._named(evaluator, f"eval/{AVERAGED}", evaluator.evaluate(ema_params, step))
                lines.append(evaluator.describe(found))
                metrics |= found
            except StoppedError:
                raise
            except Exception as error:
                if not evaluator.optional:
                    raise
                log.error(f"evaluation {evaluator.name} failed after step {step:,}: {type(error).__name__}: {error}")
        return metrics, lines

    @staticmethod
    def _prepares(evaluator: Evaluator, context: Context) -> bool:
        try:
            return evaluator.prepare(context)
        except Exception as error:
            if not evaluator.optional:
                raise
            log.error(f"evaluation {evaluator.name} is disabled: {type(error).__name__}: {error}")
            return False

    @staticmethod
    def _named(evaluator: Evaluator, prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
        prefix = f"{prefix}/{evaluator.name}" if evaluator.name else prefix
        return {f"{prefix}/{name}": value for name, value in metrics.items()}
