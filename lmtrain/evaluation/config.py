"""Settings of evaluation, including those of each evaluator; they are part of the `trainer` section."""

from typing import Self

from pydantic import model_validator

from lmtrain.checkpoint.config import BestConfig
from lmtrain.config.section import FreeText, Section, changeable

# Modules of this package, in the order in which they run, each with a function `build(config) -> Evaluator | None`.
EVALUATIONS = ("perplexity", "preferences", "samples", "core")


class EarlyStoppingConfig(BestConfig):
    """End of a run whose evaluations no longer improve."""

    patience: int = changeable(3, ge=1, description="Number of evaluations without an improvement that end the run")


class CoreConfig(Section):
    """CORE, the benchmark of DCLM and nanochat: the mean accuracy above guessing over 22 tasks."""

    bundle: str = changeable(
        "eval_bundle",
        min_length=1,
        description="Folder or URL with core.yaml, eval_meta_data.csv and eval_data/: nanochat's eval_bundle.zip, "
        "unpacked, or tasks of your own in this form",
    )
    steps: int | None = changeable(None, ge=1, description="Interval in steps; null: after the last step only")
    max_examples: int | None = changeable(None, ge=1, description="Maximum number of items of each task; null: all")
    prepend_bos: bool = changeable(True, description="Begin every prompt with the bos token, without one with eos")


class EvaluationConfig(Section):
    """Evaluation during training: how often, and on how many batches."""

    steps_per_eval: int | None = changeable(
        1000, ge=1, description="Evaluation interval in steps; also after the last step; null: never"
    )
    max_eval_batches: int | None = changeable(
        None, ge=1, description="Maximum batches per validation set and evaluation; null: all"
    )
    sample_prompts: list[FreeText] = changeable(
        [], description="Prompts that the model continues at every evaluation; the texts are logged"
    )
    core: CoreConfig | None = changeable(None, description="The benchmark CORE; null: none")
    early_stopping: EarlyStoppingConfig | None = changeable(
        None, description="End the run when an evaluation metric stops improving; null: no"
    )
    sample_length: int = changeable(
        64, ge=1, description="Maximum number of tokens that continue each of sample_prompts"
    )

    @model_validator(mode="after")
    def _prompts_need_an_interval(self) -> Self:
        if self.sample_prompts and self.steps_per_eval is None:
            raise ValueError("sample_prompts needs steps_per_eval; set it, or remove sample_prompts")
        return self

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated, which requires validation text."""
        return self.steps_per_eval is not None
