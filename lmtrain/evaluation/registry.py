"""The evaluations of a run: one row for each kind."""

from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.interface import Evaluator
from lmtrain.evaluation.perplexity import Perplexity
from lmtrain.evaluation.samples import Samples


def build_evaluators(config: EvaluationConfig) -> list[Evaluator]:
    """The evaluators that the settings enable, in the order in which they run."""
    evaluators: list[Evaluator] = []
    if config.steps_per_eval is not None:
        evaluators.append(Perplexity(config.steps_per_eval))
    if config.sample_prompts:
        evaluators.append(Samples(config.sample_prompts, config.sample_length, config.steps_per_eval))
    return evaluators
