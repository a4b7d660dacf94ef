"""MPT in the Hugging Face format: for transformers' own class, which also reads the files on the hub.

Its Linear stores [out, in], so matrices are transposed; rows of Wqkv are q, k, v, each head-major, as in ours.

transformers silently ignores many of MPT's fields and computes the plain model (ALiBi up to 8, MLP four times as wide,
no biases, multi-head attention). So exports and imports of other models are refused.
"""

from collections.abc import Mapping
from typing import Any

from lmtrain.hf.key_map import Row, Table
from lmtrain.models.base_config import SameSetting, from_hf, to_hf
from lmtrain.models.mpt.config import MptConfig
from lmtrain.runtime.errors import UserError

DEFAULT_REF = "mosaicml/mpt-7b"
MODEL_TYPES = ("mpt",)
HAS_LEARNED_POSITIONS = False
ALWAYS_HAS_BIASES = False
PUBLISHED_DTYPE = "bfloat16"

_B = "transformer.blocks.{layer}."
_ALIBI_MAX, _MLP_SCALE = 8, 4

_SETTINGS = [
    SameSetting("seq_len", "max_seq_len", 2048),
    SameSetting("hidden_dim", "d_model", 2048),
    SameSetting("num_heads", "n_heads", 16),
    SameSetting("num_layers", "n_layers", 24),
    SameSetting("resid_pdrop", "resid_pdrop", 0.0),
    SameSetting("embed_pdrop", "emb_pdrop", 0.0),
    SameSetting("tie_word_embeddings", "tie_word_embeddings", True),
]
# In `attn_config`.
_OF_ATTENTION = [SameSetting("clip_qkv", "clip_qkv", None), SameSetting("softmax_scale", "softmax_scale", None)]

# Values of a file's `attn_config` that transformers assumes.
_PLAIN_ATTENTION = {
    "attn_type": "multihead_attention",
    "alibi": True,
    "alibi_bias_max": _ALIBI_MAX,
    "prefix_lm": False,
    "qk_ln": False,
    "qk_gn": False,
    "attn_uses_sequence_id": False,
    "sliding_window_size": -1,
    "rope": False,
    "attn_logit_softcapping": None,
}
_PLAIN = {"logit_scale": None, "embedding_fraction": 1.0, "final_logit_softcapping": None, "block_overrides": None}
_LAYER_NORMS = ("layernorm", "low_precision_layernorm")


def reads(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this family."""
    return values.get("model_type") in MODEL_TYPES


def table(config: MptConfig) -> Table:
    """The table of weights of this config; biases are refused."""
    if config.use_bias:
        raise UserError("model.use_bias: transformers' mpt has no biases; cannot be exported")
    rows = [
        Row("tokens/embedding", "transformer.wte.weight", vocab=True),
        Row("norm_final/scale", "transformer.norm_f.weight"),
        Row("blocks/norm_attn/scale", _B + "norm_1.weight"),
        Row("blocks/attn/qkv/kernel", _B + "attn.Wqkv.weight", rows=1, transpose=True),
        Row("blocks/attn/out/kernel", _B + "attn.out_proj.weight", rows=2, transpose=True),
        Row("blocks/norm_mlp/scale", _B + "norm_2.weight"),
        Row("blocks/mlp/up/kernel", _B + "ffn.up_proj.weight", transpose=True),
        Row("blocks/mlp/down/kernel", _B + "ffn.down_proj.weight", transpose=True),
    ]
    return rows if config.tie_word_embeddings else [*rows, Row("unembed/embedding", "lm_head.weight", vocab=True)]


def canonical(name: str, config: MptConfig) -> str | None:
    """A tensor's name as in `table`."""
    return name.removeprefix("model.")


def to_hf_config(config: MptConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The `config.json`. Raises `UserError` naming the setting that transformers would ignore."""
    for name, value in (("alibi_bias_max", _ALIBI_MAX), ("mlp_scale", _MLP_SCALE)):
        if getattr(config, name) != value:
            ours = getattr(config, name)
            raise UserError(f"model.{name}: {ours}: transformers' mpt always has {value}; cannot be exported")
    return {
        "model_type": "mpt",
        "architectures": ["MPTForCausalLM"],  # as on the hub; other programs know this name, transformers no name
        "vocab_size": vocab_size,
        **to_hf(_SETTINGS, config),
        "expansion_ratio": config.mlp_scale,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "no_bias": True,
        "learned_pos_emb": False,
        "attn_config": {
            "attn_type": "multihead_attention",
            "attn_pdrop": 0,  # an integer in transformers; dropout in training does not matter after loading
            "attn_impl": "torch",
            "alibi": True,
            "alibi_bias_max": _ALIBI_MAX,
            **to_hf(_OF_ATTENTION, config),
            "prefix_lm": False,
            "qk_ln": False,
            "attn_uses_sequence_id": False,
        },
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
    }


def from_hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes, as read by transformers or by the files' own code."""
    attention = values.get("attn_config") or {}
    for name, plain in _PLAIN_ATTENTION.items():
        if attention.get(name, plain) != plain:
            raise UserError(f"config.json: attn_config.{name} {attention[name]} is not supported, only {plain}")
    if values.get("expansion_ratio", _MLP_SCALE) != _MLP_SCALE:
        raise UserError(f"config.json: expansion_ratio {values['expansion_ratio']} is not supported, only {_MLP_SCALE}")
    if not values.get("no_bias", True):
        raise UserError("config.json: no_bias false is not supported (nor by transformers)")
    if values.get("norm_type", "layernorm") not in _LAYER_NORMS:
        raise UserError(f"config.json: norm_type {values['norm_type']} is not supported, only {_LAYER_NORMS[0]}")
    ffn = values.get("ffn_config") or {}
    if ffn.get("ffn_type", "mptmlp") != "mptmlp" or (ffn.get("ffn_act_fn") or {"name": "gelu"}).get("name") != "gelu":
        raise UserError(f"config.json: ffn_config {ffn} is not supported, only mptmlp with gelu")
    if "alibi" not in attention and "auto_map" in values:
        raise UserError("config.json: attn_config has no alibi, which means false; only ALiBi is supported")
    for name, plain in _PLAIN.items():
        if values.get(name, plain) != plain:
            raise UserError(f"config.json: {name} {values[name]} is not supported")
    return {
        "type": "mpt",
        **from_hf(_SETTINGS, values),
        **from_hf(_OF_ATTENTION, attention),
        "layer_norm_epsilon": values.get("layer_norm_epsilon", values.get("norm_eps", 1e-5)),
        "attn_pdrop": attention.get("attn_pdrop", 0.0),
    }
