"""The `model` section: one of the families. A new family adds its config here and its row in `registry.py`."""

from typing import Annotated

from pydantic import Tag

from lmtrain.config.base import by_type
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig

FAMILY_NAMES = ("gpt2", "llama", "mpt", "backpack")

ModelConfig = Annotated[
    Annotated[Gpt2Config, Tag("gpt2")]
    | Annotated[LlamaConfig, Tag("llama")]
    | Annotated[MptConfig, Tag("mpt")]
    | Annotated[BackpackConfig, Tag("backpack")],
    by_type("model", "gpt2", FAMILY_NAMES),
]
