"""Settings of the training objective."""

from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from lmtrain.config.errors import field_error
from lmtrain.config.section import Section, by_type
from lmtrain.config.setting import identity


class _CrossEntropy(Section):
    """Settings shared by all kinds of cross-entropy."""

    label_smoothing: float = identity(
        0.0,
        ge=0,
        lt=1,
        description="Label smoothing: probability mass spread evenly over the vocabulary; training only",
    )


class CrossEntropyConfig(_CrossEntropy):
    """Next-token cross-entropy, as a mean over all target tokens."""

    type: Literal["cross_entropy"] = identity("cross_entropy", description="Objective type")


class WeightedCrossEntropyConfig(_CrossEntropy):
    """Next-token cross-entropy with weighted target tokens: a weighted mean over the batch."""

    type: Literal["weighted_cross_entropy"] = identity("weighted_cross_entropy", description="Objective type")
    source_weights: dict[str, Annotated[float, Field(ge=0)]] = identity(
        description="Weight per token of each source in data.configs, by name; 1 for sources not listed"
    )

    @model_validator(mode="after")
    def _some_weight(self) -> Any:
        if not self.source_weights:
            raise field_error("source_weights", "names no source; set objective.type: cross_entropy instead")
        return self


ObjectiveConfig = Annotated[
    Annotated[CrossEntropyConfig, Tag("cross_entropy")]
    | Annotated[WeightedCrossEntropyConfig, Tag("weighted_cross_entropy")],
    by_type("cross_entropy"),
]
