"""Latent attention in the Hugging Face format: the keys of its sizes, and its tensors."""

from collections.abc import Mapping
from typing import Any

from lmtrain.hf.key_map import Row
from lmtrain.models.base_config import SameSetting, from_hf, to_hf
from lmtrain.models.latent.config import LatentAttentionConfig
from lmtrain.runtime.errors import UserError

_SETTINGS = [
    SameSetting("q_lora_rank", "q_lora_rank", 1536),
    SameSetting("kv_lora_rank", "kv_lora_rank", 512),
    SameSetting("qk_nope_head_dim", "qk_nope_head_dim", 128),
    SameSetting("qk_rope_head_dim", "qk_rope_head_dim", 64),
    SameSetting("v_head_dim", "v_head_dim", 128),
    SameSetting("rope_interleave", "rope_interleave", True),
]


def write_latent(config: LatentAttentionConfig) -> dict[str, Any]:
    """The keys of a `config.json`, whose `head_dim` is the number of dimensions with rotary positions."""
    return to_hf(_SETTINGS, config) | {"head_dim": config.qk_rope_head_dim}


def read_latent(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of attention that a `config.json` describes."""
    heads = values["num_attention_heads"]
    if (kv_heads := values.get("num_key_value_heads")) not in (None, heads):
        raise UserError(f"config.json: num_key_value_heads {kv_heads} of {heads} heads: latent attention has all")
    latent = from_hf(_SETTINGS, values)
    if values["model_type"] == "deepseek_v2":  # transformers reads it for version 3 only
        latent["rope_interleave"] = True
    return {"latent_attention": latent, "num_kv_heads": None, "head_dim": None}


def latent_rows(config: LatentAttentionConfig, has_bias: bool, layer: str, layers: tuple[int, ...] | None) -> list[Row]:
    """The rows of the layers with these numbers, None for all; `layer` begins the names of a layer."""
    ours, theirs = "blocks/attn/", f"{layer}self_attn."
    rotated = config.qk_rope_head_dim

    def pairs(width: int) -> dict[str, Any]:
        return {"pairs": (width, rotated) if config.rope_interleave else None}

    rows = [Row(f"{ours}out/kernel", f"{theirs}o_proj.weight", rows=2, transpose=True, layers=layers)]
    biases = [Row(f"{ours}out/bias", f"{theirs}o_proj.bias", layers=layers)]
    of_queries = pairs(config.head_width)
    if config.q_lora_rank is None:
        rows.append(Row(f"{ours}q/kernel", f"{theirs}q_proj.weight", 1, True, layers=layers, **of_queries))
    else:
        rows += [
            Row(f"{ours}q_a/kernel", f"{theirs}q_a_proj.weight", transpose=True, layers=layers),
            Row(f"{ours}norm_q/scale", f"{theirs}q_a_layernorm.weight", layers=layers),
            Row(f"{ours}q_b/kernel", f"{theirs}q_b_proj.weight", 1, True, layers=layers, **of_queries),
        ]
        biases.append(Row(f"{ours}q_a/bias", f"{theirs}q_a_proj.bias", layers=layers))
    joint, of_keys = f"{theirs}kv_a_proj_with_mqa", pairs(config.kv_lora_rank + rotated)
    rows += [
        Row(f"{ours}kv_a/kernel", f"{joint}.weight", transpose=True, layers=layers, **of_keys),
        Row(f"{ours}norm_kv/scale", f"{theirs}kv_a_layernorm.weight", layers=layers),
        Row(f"{ours}kv_b/kernel", f"{theirs}kv_b_proj.weight", 1, True, layers=layers),
    ]
    biases.append(Row(f"{ours}kv_a/bias", f"{joint}.bias", layers=layers, **of_keys))
    return rows + (biases if has_bias else [])
