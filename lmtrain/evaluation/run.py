"""Running evaluations: when they are due, with which parameters, and under which metric names."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.config import EVALUATIONS, EvaluationConfig
from lmtrain.evaluation.interface import Context, Evaluator
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.signals import StoppedError

# Part of metric names of averaged parameters, between `eval` and the evaluator's name.
AVERAGED = "ema"


class Findings(NamedTuple):
    """Results of the evaluations of one step: metrics, a log line for each evaluator, and texts by their prompts."""

    metrics: dict[str, float]
    lines: list[str]
    texts: dict[str, str]


class Evaluations:
    """The evaluators of a run that have something to evaluate.

    With `strict`, errors of optional evaluators are raised too. Raises `UserError` if an evaluator has the name of a
    validation set, so metric names would clash.
    """

    def __init__(self, evaluators: Sequence[Evaluator], context: Context, strict: bool = False):
        self._strict = strict
        for evaluator in evaluators:
            if evaluator.name in context.sets and evaluator.name:
                raise UserError(
                    f"data.configs: {evaluator.name} is the name of a source and of an evaluation, so metrics of both "
                    "would have the same names; rename the source"
                )
        self._evaluators = [evaluator for evaluator in evaluators if self._prepares(evaluator, context)]

    def due(self, step: int, last: int) -> list[Evaluator]:
        """The evaluators that run after `step` updates; after the `last` step, all."""
        return [each for each in self._evaluators if step == last or (each.every and step % each.every == 0)]

    def next_after(self, step: int, last: int) -> int | None:
        """The next step after `step` with a due evaluation; None if there is none."""
        if not self._evaluators or step >= last:
            return None
        return min(last, *((step // each.every + 1) * each.every for each in self._evaluators if each.every), last)

    def run(self, due: Sequence[Evaluator], params: Any, ema_params: Any, step: int) -> Findings:
        """All findings, also for `ema_params` unless None.

        Raises `StoppedError` if the run has to stop; then nothing of this step counts as evaluated.
        """
        findings = Findings({}, [], {})
        for evaluator in due:
            try:
                metrics, texts = _split(evaluator, "eval", evaluator.evaluate(params, step))
                if ema_params is not None:
                    averaged, better = _split(evaluator, f"eval/{AVERAGED}", evaluator.evaluate(ema_params, step))
                    metrics, texts = metrics | averaged, texts | better
                findings.lines.append(evaluator.describe(metrics | texts))
                findings.metrics.update(metrics)
                findings.texts.update(texts)
            except StoppedError:
                raise
            except Exception as error:
                if self._strict or not evaluator.optional:
                    raise
                log.error(f"evaluation {evaluator.name} failed after step {step:,}: {type(error).__name__}: {error}")
        return findings

    def _prepares(self, evaluator: Evaluator, context: Context) -> bool:
        try:
            return evaluator.prepare(context)
        except UserError:
            raise
        except Exception as error:
            if self._strict or not evaluator.optional:
                raise
            log.error(f"evaluation {evaluator.name} is disabled: {type(error).__name__}: {error}")
            return False


def _split(
    evaluator: Evaluator, prefix: str, results: Mapping[str, float | str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Metrics with full names, and texts."""
    prefix = f"{prefix}/{evaluator.name}" if evaluator.name else prefix
    metrics = {f"{prefix}/{name}": value for name, value in results.items() if not isinstance(value, str)}
    return metrics, {name: value for name, value in results.items() if isinstance(value, str)}


def build_evaluators(
    config: EvaluationConfig, harness: EvalHarnessConfig | None = None, harness_steps: int | None = None
) -> list[Evaluator]:
    """The evaluators that the settings enable, in the order in which they run; benchmarks at every `harness_steps`."""
    modules = [importlib.import_module(f"lmtrain.evaluation.{name}") for name in EVALUATIONS]
    evaluators: list[Evaluator] = [evaluator for module in modules if (evaluator := module.build(config))]
    return evaluators if harness is None else [*evaluators, Benchmarks(harness, harness_steps)]
