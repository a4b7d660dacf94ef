"""Config -> model: one row per family. The only place outside a family's folder that knows its name."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmtrain.config.errors import UserError
from lmtrain.models.config import ModelConfig

if TYPE_CHECKING:
    from lmtrain.models.interface import LanguageModel

# type in the config -> (module of the model and its class, module of its Hugging Face table)
FAMILIES = {
    "gpt2": ("lmtrain.models.gpt2.model", "Gpt2LM", "lmtrain.models.gpt2.hf"),
    "llama": ("lmtrain.models.llama.model", "LlamaLM", "lmtrain.models.llama.hf"),
    "mpt": ("lmtrain.models.mpt.model", "MptLM", "lmtrain.models.mpt.hf"),
    "backpack": ("lmtrain.models.backpack.model", "BackpackLM", "lmtrain.models.backpack.hf"),
}


def build_model(config: ModelConfig, vocab_size: int, attention: str = "xla") -> "LanguageModel":
    """The Linen module of a config. `attention` is a backend that supports the config."""
    module, name, _ = FAMILIES[config.type]
    model: LanguageModel = getattr(importlib.import_module(module), name)(config, vocab_size, attention)
    return model


def hf_family(family: str) -> Any:
    """The family's `hf` module: `table(config)` of weight names, their `canonical` form, and conversion of configs."""
    return importlib.import_module(FAMILIES[family][2])


def family_of(values: Mapping[str, Any]) -> Any:
    """The `hf` module of the family of a Hugging Face `config.json`. Raises `UserError` if there is none."""
    modules = [hf_family(family) for family in FAMILIES]
    for module in modules:
        if module.reads(values):
            return module
    known = [name for module in modules for name in module.MODEL_TYPES]
    kind = values.get("model_type")
    raise UserError(f"config.json: model_type {kind!r} is not supported; expected one of {', '.join(known)}")
