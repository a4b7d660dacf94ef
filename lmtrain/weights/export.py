"""What an export has, except for the values: of a model for `transformers`, or of adapters for PEFT."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.key_map import Piece
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.lora.model import AdaptedModel
from lmtrain.lora.peft import to_adapter_config
from lmtrain.lora.sites import list_sites
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, shapes_by_path
from lmtrain.models.registry import hf_family
from lmtrain.run.config import RunConfig
from lmtrain.weights.export_folder import ModelOrigin
from lmtrain.weights.load_hf import build_hf_pieces
from lmtrain.weights.load_peft import build_adapter_pieces, trained_tables


@dataclass(frozen=True)
class Export:
    """Contents of an export, except for the values of the tensors.

    `origin` is the model's run, if any. `seq_len` is the maximum length in tokens, written as `model_max_length` of
    the tokenizer unless its settings have one; `max_length` that of generation, for models that have no position after
    it. `generation` are further settings of generation. `is_adapter`: adapters in PEFT's format, whose `config` is an
    `adapter_config.json`. `chat_template` is that of the training data; None: the tokenizer's own.
    """

    pieces: Sequence[Piece]
    config: Mapping[str, Any]
    extra_files: Mapping[str, bytes]
    tokenizer: Tokenizer
    dtype: str
    origin: ModelOrigin | None = None
    seq_len: int | None = None
    max_length: int | None = None
    is_adapter: bool = False
    chat_template: ChatTemplate | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(piece.shape) for piece in self.pieces)


def build_export(
    config: ModelConfig, model: LanguageModel, tokenizer: Tokenizer, dtype: str, origin: ModelOrigin | None = None
) -> Export:
    """The export of a model. Raises `UserError` naming a setting that the target format cannot represent."""
    family = hf_family(config.type)
    hf_config = family.to_hf_config(config, model.vocab_size, tokenizer.eos_id, tokenizer.bos_id)
    extra = family.extra_files() if hasattr(family, "extra_files") else {}
    max_length = config.seq_len if family.HAS_LEARNED_POSITIONS else None
    pieces = build_hf_pieces(config, model)
    return Export(pieces, hf_config, extra, tokenizer, dtype, origin, config.seq_len, max_length)


def build_adapter_export(
    config: RunConfig,
    model: AdaptedModel,
    tokenizer: Tokenizer,
    dtype: str,
    origin: ModelOrigin | None,
    base_model: str | None,
) -> Export:
    """The export of adapters. `base_model` is the Hugging Face model that they belong to, if it is one."""
    assert config.lora is not None
    sites = list_sites(hf_family(config.model.type).table(config.model), shapes_by_path(abstract_params(model.inner)))
    tables = trained_tables(config.model, model)
    values = to_adapter_config(config.lora, model.sites, sites, tables, base_model)
    pieces = build_adapter_pieces(config.model, model)
    return Export(pieces, values, {}, tokenizer, dtype, origin, config.model.seq_len, is_adapter=True)
