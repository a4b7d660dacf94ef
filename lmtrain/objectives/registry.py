"""Config -> objective: one row for each type."""

from collections.abc import Callable
from typing import Any

from lmtrain.objectives.config import ObjectiveConfig
from lmtrain.objectives.cross_entropy import CrossEntropy, CrossEntropyRow, WeightedCrossEntropy
from lmtrain.objectives.distillation import Distillation
from lmtrain.objectives.interface import Objective
from lmtrain.objectives.preferences import Preferences

# type -> constructor from its config section and `z_loss_weight`
OBJECTIVES: dict[str, Callable[[Any, float], Objective]] = {
    "cross_entropy": lambda config, z: CrossEntropy(CrossEntropyRow(z, config.label_smoothing)),
    "weighted_cross_entropy": lambda config, z: WeightedCrossEntropy(CrossEntropyRow(z, config.label_smoothing)),
    "dpo": lambda config, _: Preferences(config.loss, config.beta, config.label_smoothing),
    "distill": lambda config, _: Distillation(config.temperature, config.alpha),
    "orpo": lambda config, _: Preferences("orpo", config.beta),
}


def build_objective(config: ObjectiveConfig, z_loss_weight: float) -> Objective:
    """Build the objective of a run."""
    return OBJECTIVES[config.type](config, z_loss_weight)
