"""Llama and its relatives in the Hugging Face format.

transformers' Linear stores [out, in], so matrices are transposed; heads come first in `out`, as in ours flattened.
"""

from collections.abc import Mapping
from typing import Any

from lmtrain.hf.key_map import Row, Table
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.hf_config import expert_rows, from_hf_config, to_hf_config
from lmtrain.models.llama.relatives import RELATIVES, UNSUPPORTED

__all__ = ["UNSUPPORTED", "from_hf_config", "to_hf_config"]  # for `lmtrain.models.registry`

DEFAULT_REF = "meta-llama/Llama-2-7b-hf"
HAS_LEARNED_POSITIONS = False
ALWAYS_HAS_BIASES = False
PUBLISHED_DTYPE = "bfloat16"

MODEL_TYPES = tuple(RELATIVES)

_L = "model.layers.{layer}."

# By the position of norms: ours and theirs.
_NORMS = {
    "pre": {"norm_attn": "input_layernorm", "norm_mlp": "post_attention_layernorm"},
    "post": {"norm_attn": "post_attention_layernorm", "norm_mlp": "post_feedforward_layernorm"},
    "both": {
        "norm_attn": "input_layernorm",
        "norm_mixed": "post_attention_layernorm",
        "norm_mlp": "pre_feedforward_layernorm",
        "norm_added": "post_feedforward_layernorm",
    },
}


def reads(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this family."""
    return values.get("model_type") in MODEL_TYPES


def table(config: LlamaConfig) -> Table:
    """The table of weights of this config."""
    rows = [
        Row("tokens/embedding", "model.embed_tokens.weight", vocab=True),
        Row("norm_final/scale", "model.norm.weight"),
        *(Row(f"blocks/{ours}/scale", f"{_L}{theirs}.weight") for ours, theirs in _NORMS[config.norm_position].items()),
        Row("blocks/attn/out/kernel", _L + "self_attn.o_proj.weight", rows=2, transpose=True),
    ]
    rows += [
        Row(f"blocks/attn/{name}/kernel", f"{_L}self_attn.{name}_proj.weight", rows=1, transpose=True) for name in "qkv"
    ]
    mlp = ("gate", "up", "down") if config.gated_mlp else ("up", "down")
    dense = None if config.moe is None else config.dense_layers
    if dense != ():
        rows += [
            Row(f"blocks/mlp/{name}/kernel", f"{_L}mlp.{name}_proj.weight", transpose=True, layers=dense)
            for name in mlp
        ]
    if config.moe is not None:
        rows += expert_rows(config, _L)
    if config.use_bias or config.use_qkv_bias:
        rows += [Row(f"blocks/attn/{name}/bias", f"{_L}self_attn.{name}_proj.bias", rows=0) for name in "qkv"]
    if config.use_bias:
        rows.append(Row("blocks/attn/out/bias", _L + "self_attn.o_proj.bias"))
    if config.use_mlp_bias:
        rows += [Row(f"blocks/mlp/{name}/bias", f"{_L}mlp.{name}_proj.bias", layers=dense) for name in mlp]
    if config.qk_norm in ("head", "all"):
        rows += [Row(f"blocks/attn/norm_{name}/scale", f"{_L}self_attn.{name}_norm.weight", rows=0) for name in "qk"]
    if not config.tie_word_embeddings:
        rows.append(Row("unembed/embedding", "lm_head.weight", vocab=True))
    return rows


def canonical(name: str) -> str | None:
    """A tensor's name as in `table`; None for tables of frequencies in old files."""
    return None if name.endswith("rotary_emb.inv_freq") else name
