"""The evaluations of a run."""

import importlib

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.config import EVALUATIONS, EvaluationConfig
from lmtrain.evaluation.interface import Evaluator


def build_evaluators(
    config: EvaluationConfig, harness: EvalHarnessConfig | None = None, harness_steps: int | None = None
) -> list[Evaluator]:
    """The evaluators that the settings enable, in the order in which they run; benchmarks at every `harness_steps`."""
    modules = [importlib.import_module(f"lmtrain.evaluation.{name}") for name in EVALUATIONS]
    evaluators: list[Evaluator] = [evaluator for module in modules if (evaluator := module.build(config))]
    return evaluators if harness is None else [*evaluators, Benchmarks(harness, harness_steps)]
