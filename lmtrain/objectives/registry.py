"""Config -> objective: one row for each type."""

from lmtrain.objectives.config import ObjectiveConfig
from lmtrain.objectives.cross_entropy import CrossEntropy, CrossEntropyRow, WeightedCrossEntropy
from lmtrain.objectives.interface import Objective

OBJECTIVES = {"cross_entropy": CrossEntropy, "weighted_cross_entropy": WeightedCrossEntropy}


def build_objective(config: ObjectiveConfig, z_loss_weight: float) -> Objective:
    """The objective of a run."""
    return OBJECTIVES[config.type](CrossEntropyRow(z_loss_weight, config.label_smoothing))
