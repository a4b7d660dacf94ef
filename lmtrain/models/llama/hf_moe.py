"""Mixtures of experts in the Hugging Face format: names of weights, and the keys of a `config.json`."""

from collections.abc import Mapping
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Row
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.relatives import RELATIVES, HfExperts, Values, is_of_type

# Keys that have to have these values.
_ROUTER_KEYS = {"router_jitter_noise": 0.0, "clip_qkv": None}

_OTHERS = HfExperts("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts")


def expert_rows(config: LlamaConfig, layer: str) -> list[Row]:
    """The rows of the layers with experts; `layer` begins the names of a layer.

    Experts that no model type has get names like those of Qwen3-MoE: only exports need the type, LoRA does not.
    Their `down` contains the factor of the weights, which no type has.
    """
    assert config.moe is not None
    factors = {"down": config.moe.routed_scaling_factor}
    types = [relative.experts for relative in RELATIVES.values() if is_of_type(config, relative)]
    names, layers = next((experts for experts in types if experts), _OTHERS), config.expert_layers
    prefix = layer + names.prefix
    rows = [Row("blocks/moe/router/kernel", f"{prefix}.gate.weight", transpose=True, layers=layers)]
    rows += [
        Row(
            f"blocks/moe/experts/{ours}/kernel",
            f"{prefix}.experts.{{expert}}.{theirs}.weight",
            transpose=True,
            layers=layers,
            factor=factors.get(ours, 1.0),
        )
        for ours, theirs in zip(("gate", "up", "down"), names.matrices, strict=True)
    ]
    return rows


def write_experts(config: LlamaConfig, names: HfExperts) -> dict[str, Any]:
    """The keys of a `config.json`. Its balancing loss is as many times larger as a token has experts."""
    moe = config.moe
    assert moe is not None
    values: dict[str, Any] = {
        names.number_key: moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        names.width_key: config.expert_dim,
        "router_aux_loss_coef": moe.aux_loss / moe.experts_per_token,
    }
    if names.can_be_unnormalized:
        values["norm_topk_prob"] = moe.normalize
    if names.can_be_mixed:
        values |= {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return values


def read_experts(values: Values, names: HfExperts) -> dict[str, Any]:
    """The settings of `model.moe` that a `config.json` describes. No type has a z-loss."""
    for key, neutral in _ROUTER_KEYS.items():
        if values.get(key) not in (None, neutral):
            raise UserError(f"config.json: {key} {values[key]} is not supported")
    per_token = values.get("num_experts_per_tok", names.per_token)
    keys = (names.number_key, "num_experts", "num_local_experts")
    settings: dict[str, Any] = {
        "num_experts": next((values[key] for key in keys if key in values), names.number),
        "experts_per_token": per_token,
        "normalize": values.get("norm_topk_prob", False) if names.can_be_unnormalized else True,
        "aux_loss": values.get("router_aux_loss_coef", names.aux_loss) * per_token,
        "z_loss": 0.0,
    }
    if names.width_key != "intermediate_size":
        settings["intermediate_dim"] = values.get(names.width_key, 768)
    return settings


def has_experts(values: Mapping[str, Any], names: HfExperts | None, layer: int) -> bool:
    """Whether a layer of a `config.json` has experts instead of one MLP."""
    if names is None or not names.can_be_mixed:
        return names is not None
    is_dense = layer in (values.get("mlp_only_layers") or [])
    return not is_dense and (layer + 1) % values.get("decoder_sparse_step", 1) == 0
