"""The `model` section: one of the families, each a member of `Families`. The only list of families in lmtrain."""

from typing import Annotated, get_args

from pydantic import Tag

from lmtrain.config.section import by_type
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig

# The tag is the value of `type`, and the name of the family's package.
Families = (
    Annotated[Gpt2Config, Tag("gpt2")]
    | Annotated[LlamaConfig, Tag("llama")]
    | Annotated[MptConfig, Tag("mpt")]
    | Annotated[BackpackConfig, Tag("backpack")]
)

FAMILY_NAMES: tuple[str, ...] = tuple(get_args(family)[1].tag for family in get_args(Families))

ModelConfig = Annotated[Families, by_type("gpt2")]
