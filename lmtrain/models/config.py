"""The `model` section: one of the families. A new family adds its config here and its row in `registry.py`."""

from lmtrain.models.gpt2.config import Gpt2Config

ModelConfig = Gpt2Config
