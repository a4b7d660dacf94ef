"""Config -> model: the modules of a family, found by their names.

The family `mine` is the package `lmtrain/models/mine/`: `MineConfig` in `config.py`, `MineLM` in `model.py`, and its
Hugging Face table in `hf.py`.
"""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmtrain.models.attention.names import PLAIN
from lmtrain.models.config import FAMILY_NAMES, ModelConfig
from lmtrain.runtime.errors import UserError

if TYPE_CHECKING:
    from lmtrain.models.interface import LanguageModel


def build_model(config: ModelConfig, vocab_size: int, attention: str = PLAIN) -> "LanguageModel":
    """The Linen module of a config. `attention` is a backend that supports the config."""
    model: LanguageModel = config.build(vocab_size, attention)
    return model


def hf_family(family: str) -> Any:
    """The family's `hf` module: `table(config)` of weight names, their `canonical` form, and conversion of configs."""
    return importlib.import_module(f"lmtrain.models.{family}.hf")


def family_of(values: Mapping[str, Any]) -> Any:
    """The `hf` module of the family of a Hugging Face `config.json`. Raises `UserError` if there is none."""
    modules = [hf_family(family) for family in FAMILY_NAMES]
    for module in modules:
        if module.reads(values):
            return module
    known = [name for module in modules for name in module.MODEL_TYPES]
    kind = values.get("model_type")
    for module in modules:
        if lacking := getattr(module, "UNSUPPORTED", {}).get(kind):
            raise UserError(f"config.json: model_type {kind!r} is not supported: lmtrain has no {lacking}")
    raise UserError(f"config.json: model_type {kind!r} is not supported; expected one of {', '.join(known)}")
