"""Settings of evaluation, including those of each evaluator; they are part of the `trainer` section."""

from pydantic import Field

from lmtrain.config.base import Section


class EvaluationConfig(Section):
    """Evaluation during training: how often, and on how many batches."""

    steps_per_eval: int | None = Field(
        1000, ge=1, description="Evaluation interval in steps; also after the last step; null: never"
    )
    max_eval_batches: int | None = Field(
        None, ge=1, description="Maximum batches per validation set and evaluation; null: all"
    )

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated, which requires validation text."""
        return self.steps_per_eval is not None
