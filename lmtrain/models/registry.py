"""Config -> model: one row per family. The only place outside a family's folder that knows its name."""

import importlib
from typing import Any

from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel

# type in the config -> (module of the model and its class, module of its Hugging Face table)
FAMILIES = {
    "gpt2": ("lmtrain.models.gpt2.model", "Gpt2LM", "lmtrain.models.gpt2.hf"),
    "llama": ("lmtrain.models.llama.model", "LlamaLM", "lmtrain.models.llama.hf"),
}


def build_model(config: ModelConfig, vocab_size: int) -> LanguageModel:
    """The Linen module of a config."""
    module, name, _ = FAMILIES[config.type]
    model: LanguageModel = getattr(importlib.import_module(module), name)(config, vocab_size)
    return model


def hf_family(config: ModelConfig) -> Any:
    """The family's `hf` module: `table(config)` of weight names, and `to_hf_config`."""
    return importlib.import_module(FAMILIES[config.type][2])
