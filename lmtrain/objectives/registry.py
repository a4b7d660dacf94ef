"""Config -> objective: one row for each type."""

from collections.abc import Callable
from typing import Any

from lmtrain.objectives.config import ObjectiveConfig
from lmtrain.objectives.cross_entropy import CrossEntropy, CrossEntropyRow, WeightedCrossEntropy
from lmtrain.objectives.distillation import Distillation
from lmtrain.objectives.interface import Objective
from lmtrain.objectives.preferences import Preferences

# type -> constructor from its config section, `z_loss_weight`, and the cap of a teacher's logits
OBJECTIVES: dict[str, Callable[[Any, float, float | None], Objective]] = {
    "cross_entropy": lambda config, z, _: CrossEntropy(CrossEntropyRow(z, config.label_smoothing)),
    "weighted_cross_entropy": lambda config, z, _: WeightedCrossEntropy(CrossEntropyRow(z, config.label_smoothing)),
    "dpo": lambda config, *_: Preferences(config.loss, config.beta, config.label_smoothing),
    "distill": lambda config, _, cap: Distillation(config.temperature, config.alpha, cap),
    "orpo": lambda config, *_: Preferences("orpo", config.beta),
}


def build_objective(config: ObjectiveConfig, z_loss_weight: float, teacher_cap: float | None = None) -> Objective:
    """Build the objective of a run. `teacher_cap`: see `Chunks.cap`."""
    return OBJECTIVES[config.type](config, z_loss_weight, teacher_cap)
