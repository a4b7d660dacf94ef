"""The evaluations of a run: one row for each kind."""

from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.evaluation.benchmarks.evaluator import Benchmarks
from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.interface import Evaluator
from lmtrain.evaluation.perplexity import Perplexity
from lmtrain.evaluation.samples import Samples


def build_evaluators(
    config: EvaluationConfig, harness: EvalHarnessConfig | None = None, harness_steps: int | None = None
) -> list[Evaluator]:
    """The evaluators that the settings enable, in the order in which they run; benchmarks at every `harness_steps`."""
    evaluators: list[Evaluator] = []
    if config.steps_per_eval is not None:
        evaluators.append(Perplexity(config.steps_per_eval))
    if config.sample_prompts:
        evaluators.append(Samples(config.sample_prompts, config.sample_length, config.steps_per_eval))
    if harness is not None:
        evaluators.append(Benchmarks(harness, harness_steps))
    return evaluators
