"""Llama and its relatives in the Hugging Face format.

transformers' Linear stores [out, in], so matrices are transposed; heads come first in `out`, as in ours flattened.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmtrain.hf.key_map import Row, Table
from lmtrain.models.gated_delta.hf import FORMS, OLMO_HYBRID, QWEN3_5, DeltaForm, delta_rows
from lmtrain.models.latent.hf import latent_rows
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.hf_config import from_hf_config, to_hf_config
from lmtrain.models.llama.hf_experts import expert_rows
from lmtrain.models.llama.relatives import RELATIVES, UNSUPPORTED, WITH_IMAGES, is_of_type, relative_of
from lmtrain.runtime.logging import log

__all__ = ["UNSUPPORTED", "from_hf_config", "to_hf_config"]  # for `lmtrain.models.registry`

DEFAULT_REF = "meta-llama/Llama-2-7b-hf"
HAS_LEARNED_POSITIONS = False
ALWAYS_HAS_BIASES = False
PUBLISHED_DTYPE = "bfloat16"

MODEL_TYPES = (*RELATIVES, *WITH_IMAGES)

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
        *_norm_rows(config),
    ]
    attention = None if config.linear_attention is None else config.attention_layers
    if config.latent_attention is not None:
        rows += latent_rows(config.latent_attention, config.use_bias, _L, attention)
    elif attention != ():
        rows += _attention_rows(config, attention)
    if config.linear_attention is not None:
        rows += delta_rows(config.linear_attention, _form(config), _L, config.linear_layers)
    mlp = ("gate", "up", "down") if config.gated_mlp else ("up", "down")
    dense = None if config.moe is None else config.dense_layers
    if dense != ():
        rows += [
            Row(f"blocks/mlp/{name}/kernel", f"{_L}mlp.{name}_proj.weight", transpose=True, layers=dense)
            for name in mlp
        ]
    if config.moe is not None:
        rows += expert_rows(config, _L)
    if config.use_mlp_bias:
        rows += [Row(f"blocks/mlp/{name}/bias", f"{_L}mlp.{name}_proj.bias", layers=dense) for name in mlp]
    if not config.tie_word_embeddings:
        rows.append(Row("unembed/embedding", "lm_head.weight", vocab=True))
    return rows + _mtp_rows(config, rows)


def _mtp_rows(config: LlamaConfig, rows: list[Row]) -> list[Row]:
    """The modules that predict further tokens, as DeepSeek-V3's: layers after the last one, with the names of it."""
    if config.mtp is None:
        return []
    last = config.num_layers - 1
    layers = tuple(range(config.num_layers, config.num_layers + config.mtp.num_modules))
    names = {"norm_token": "enorm", "norm_hidden": "hnorm", "norm_out": "shared_head.norm"}
    around = [Row(f"mtp/{ours}/scale", f"{_L}{theirs}.weight", layers=layers) for ours, theirs in names.items()]
    around.append(Row("mtp/project/kernel", f"{_L}eh_proj.weight", transpose=True, layers=layers))
    return around + [
        replace(row, ours=f"mtp/{row.ours.replace('blocks', 'block', 1)}", layers=layers, named_in=None)
        for row in rows
        if row.is_stacked and all(own is None or last in own for own in (row.layers, row.named_in))
    ]


def exported_config(config: LlamaConfig) -> LlamaConfig:
    """The config of an export: without modules that its model type does not have."""
    if config.mtp is None or relative_of(config) == "deepseek_v3":
        return config
    log.info("model.mtp: the modules are left out of the export: the model type of transformers has none")
    return config.model_copy(update={"mtp": None})


def _norm_rows(config: LlamaConfig) -> list[Row]:
    """The norms of the blocks, which can have other names in linear layers."""
    linear = _form(config).norms if config.linear_attention is not None else None
    where = None if linear is None else config.attention_layers
    position = config.kinds[where[0]].norm_position or "pre" if where else config.norm_position
    names = _NORMS[position]
    others = (linear or {}).items()
    # transformers 5 writes the name of a linear layer's norm for this one
    also = {"post_attention_layernorm": f"{_L}{linear['norm_mlp']}.weight"} if linear else {}
    rows = [
        Row(f"blocks/{ours}/scale", f"{_L}{theirs}.weight", named_in=where, also=also.get(theirs))
        for ours, theirs in names.items()
    ]
    return rows + [
        Row(f"blocks/{ours}/scale", f"{_L}{theirs}.weight", named_in=config.linear_layers) for ours, theirs in others
    ]


def _attention_rows(config: LlamaConfig, layers: tuple[int, ...] | None) -> list[Row]:
    ours, theirs = "blocks/attn/", f"{_L}self_attn."
    rows = [Row(f"{ours}out/kernel", f"{theirs}o_proj.weight", rows=2, transpose=True, layers=layers)]
    rows += [
        Row(f"{ours}{name}/kernel", f"{theirs}{name}_proj.weight", rows=1, transpose=True, layers=layers)
        for name in "qkv"
    ]
    if config.use_bias or config.use_qkv_bias:
        rows += [Row(f"{ours}{name}/bias", f"{theirs}{name}_proj.bias", rows=0, layers=layers) for name in "qkv"]
    if config.use_bias:
        rows.append(Row(f"{ours}out/bias", f"{theirs}o_proj.bias", layers=layers))
    if config.attention_sinks:
        rows.append(Row(f"{ours}sinks", f"{theirs}sinks", layers=layers))
    if config.qk_norm in ("head", "all"):
        rows += [Row(f"{ours}norm_{name}/scale", f"{theirs}{name}_norm.weight", rows=0, layers=layers) for name in "qk"]
    return rows


def _form(config: LlamaConfig) -> DeltaForm:
    """The names of linear layers. Models that no type has get names, too: adapters have them in their files."""
    own = config.linear_attention
    if own is not None and own.weight_format is not None:
        return FORMS[own.weight_format]
    forms = (relative.linear for relative in RELATIVES.values() if is_of_type(config, relative))
    positions = {kind.norm_position for kind in config.kinds}
    return next((form for form in forms if form is not None), QWEN3_5 if len(positions) == 1 else OLMO_HYBRID)


_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_OF_TEXT = "model.language_model."


def canonical(name: str, config: LlamaConfig) -> str | None:
    """A tensor's name as in `table`; None for what lmtrain leaves out: tables of frequencies in old files, the vision
    part of a model of text and images, and modules that predict further tokens, if `mtp` does not have them."""
    if name.endswith("rotary_emb.inv_freq") or name.startswith(("model.visual.", "mtp.")):
        return None
    if (found := _LAYER.match(name)) and int(found[1]) >= config.num_layers:
        modules = 0 if config.mtp is None else config.mtp.num_modules
        is_copy = name.endswith((".embed_tokens.weight", ".shared_head.head.weight"))
        return None if is_copy or int(found[1]) >= config.num_layers + modules else name
    return f"model.{name.removeprefix(_OF_TEXT)}" if name.startswith(_OF_TEXT) else name
