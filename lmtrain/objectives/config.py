"""Settings of the training objective."""

import importlib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Tag, model_validator

from lmtrain.config.section import Section, by_type, identity
from lmtrain.runtime.errors import field_error


class _Objective(Section):
    """What an objective needs: pairs of answers as data; the log-probabilities of the model that it starts from."""

    needs_pairs: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    module: ClassVar[str]  # of this package, whose `build` takes the config and `z_loss_weight`

    @property
    def is_cross_entropy(self) -> bool:
        """Whether it is a cross-entropy of the tokens, which z-loss and estimates of the Hessian require."""
        return False

    def build(self, z_loss_weight: float) -> Any:
        """The `Loss`. Imports JAX."""
        return importlib.import_module(f"lmtrain.objectives.{self.module}").build(self, z_loss_weight)


class _CrossEntropy(_Objective):
    """Settings shared by all kinds of cross-entropy."""

    module: ClassVar[str] = "cross_entropy"

    @property
    def is_cross_entropy(self) -> bool:
        return True

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


class DpoConfig(_Objective):
    """Direct preference optimization: raises the probability of chosen answers over that of rejected ones, relative to
    the model that training starts from."""

    module: ClassVar[str] = "preferences"
    needs_pairs: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    type: Literal["dpo"] = identity("dpo", description="Objective type")
    beta: float = identity(0.1, gt=0, description="Strength with which the model is kept near the reference")
    loss: Literal["sigmoid", "ipo"] = identity(
        "sigmoid", description="Loss of a pair's margin: sigmoid (DPO), or ipo (squared distance from 1 / (2 beta))"
    )
    label_smoothing: float = identity(
        0.0, ge=0, lt=0.5, description="Probability that a label is wrong (conservative DPO); for loss sigmoid only"
    )

    @model_validator(mode="after")
    def _smoothing_has_an_effect(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise field_error("label_smoothing", "has no effect with loss: ipo; set it to 0.0")
        return self


class OrpoConfig(_Objective):
    """Odds-ratio preference optimization: cross-entropy of the chosen answers with their prompts, and a preference for
    them over the rejected ones. It has no reference."""

    module: ClassVar[str] = "preferences"
    needs_pairs: ClassVar[bool] = True

    type: Literal["orpo"] = identity("orpo", description="Objective type")
    beta: float = identity(0.1, gt=0, description="Weight of the preference, relative to the cross-entropy")


class SimpoConfig(_Objective):
    """Simple preference optimization: raises the mean log-probability per token of chosen answers above that of
    rejected ones, by a margin. It has no reference."""

    module: ClassVar[str] = "preferences"
    needs_pairs: ClassVar[bool] = True

    type: Literal["simpo"] = identity("simpo", description="Objective type")
    beta: float = identity(2.0, gt=0, description="Factor of the mean log-probabilities, whose products are rewards")
    gamma: float = identity(1.0, ge=0, description="Margin between the rewards of a pair that is aimed at")


class DistillConfig(_Objective):
    """Knowledge distillation: the model learns the distribution over all tokens of a frozen teacher with the same
    tokenizer, at every target token: alpha * temperature^2 * KL(teacher || model) + (1 - alpha) * cross-entropy."""

    module: ClassVar[str] = "distillation"

    type: Literal["distill"] = identity("distill", description="Objective type")
    teacher: str = identity(min_length=1, description="The teacher: a folder or hub id of a Hugging Face model")
    temperature: float = identity(
        1.0, gt=0, description="The logits of both models are divided by it; above 1, unlikely tokens count more"
    )
    alpha: float = identity(1.0, gt=0, le=1, description="Weight of the divergence; the rest is that of cross-entropy")


ObjectiveConfig = Annotated[
    Annotated[CrossEntropyConfig, Tag("cross_entropy")]
    | Annotated[WeightedCrossEntropyConfig, Tag("weighted_cross_entropy")]
    | Annotated[DpoConfig, Tag("dpo")]
    | Annotated[OrpoConfig, Tag("orpo")]
    | Annotated[SimpoConfig, Tag("simpo")]
    | Annotated[DistillConfig, Tag("distill")],
    by_type("cross_entropy"),
]
