"""Settings of evaluation. Each evaluator has its own here; they stand in the `trainer` section."""

from pydantic import Field

from lmtrain.config.base import Section


class EvaluationConfig(Section):
    """What is evaluated in training, how often, and on how much."""

    steps_per_eval: int | None = Field(
        1000, ge=1, description="Evaluate every so many steps, and after the last; null: never"
    )
    max_eval_batches: int | None = Field(None, ge=1, description="Batches per evaluation; null: the whole set")

    @property
    def evaluates(self) -> bool:
        """Whether anything is evaluated, so that validation text is needed."""
        return self.steps_per_eval is not None
