"""Config -> objective. The section of each type builds its loss, as that of a model builds the model."""

from collections.abc import Mapping
from dataclasses import replace

from lmtrain.models.base_config import FurtherLoss
from lmtrain.objectives.config import ObjectiveConfig
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.objectives.interface import LOSS, Loss, Objective, Weighted
from lmtrain.runtime.errors import UserError


def build_objective(
    config: ObjectiveConfig, z_loss_weight: float, further: Mapping[str, FurtherLoss] | None = None
) -> Objective:
    """The objective of a run; `further` are the losses of the model's outputs besides the main one.

    If the main loss is a cross-entropy, the others have its settings. Raises `UserError` for answers in pairs and a
    model with further outputs: both answers would be learned.
    """
    main: Loss = config.build(z_loss_weight)
    if further and config.needs_pairs:
        raise UserError(f"objective.type: {config.type} cannot train the model's outputs {', '.join(further)}")
    like = main if isinstance(main, CrossEntropy) else CrossEntropy()
    others = {
        name: Weighted(replace(like, output=own.output, shift=own.shift), own.coefficient)
        for name, own in (further or {}).items()
    }
    return {LOSS: Weighted(main), **others}
