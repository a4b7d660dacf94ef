"""Mixtures of experts in the Hugging Face format: their keys in `config.json`, in both directions, and weights."""

from collections.abc import Mapping
from typing import Any

from lmtrain.hf.key_map import Row
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.relatives import RELATIVES, HfExperts, Values, is_of_type
from lmtrain.models.moe.load import BIAS
from lmtrain.runtime.errors import UserError

# Keys that have to have these values.
_ROUTER_KEYS = {"router_jitter_noise": 0.0, "clip_qkv": None, "swiglu_alpha": 1.702}

_OTHERS = HfExperts("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts")


def expert_rows(config: LlamaConfig, layer: str) -> list[Row]:
    """The rows of the layers with experts; `layer` begins the names of a layer.

    Experts that no model type has get names like those of Qwen3-MoE: only exports need the type, LoRA does not.
    Their `down` contains the factor of the weights, which only DeepSeek's types have.
    """
    assert config.moe is not None
    types = [relative.experts for relative in RELATIVES.values() if is_of_type(config, relative)]
    names, layers = next((experts for experts in types if experts), _OTHERS), config.expert_layers
    factors = {} if names.deepseek else {"down": config.moe.routed_scaling_factor}
    prefix, units = layer + names.prefix, ("gate", "up", "down")
    rows: list[Row] = []
    for ours, theirs in (("kernel", "weight"), ("bias", "bias"))[: 1 + config.moe.biases]:
        rows.append(
            Row(f"blocks/moe/router/{ours}", f"{prefix}.{names.router}.{theirs}", transpose=True, layers=layers)
        )
        for unit, place in zip(units, _places(names, ours, config.expert_dim), strict=True):
            name, factor = f"{prefix}.experts.{place.pop('name')}", factors.get(unit, 1.0)
            rows.append(Row(f"blocks/moe/experts/{unit}/{ours}", name, layers=layers, factor=factor, **place))
    if config.moe.bias_update_rate is not None:
        name = f"{prefix}.{names.router}.e_score_correction_bias"
        rows.append(Row(f"blocks/moe/router/{BIAS}", name, layers=layers, exact=True))
    if config.moe.shared_experts:
        shared = f"{prefix}.{names.shared or 'shared_expert'}"
        rows += [
            Row(f"blocks/moe/shared/{name}/kernel", f"{shared}.{name}_proj.weight", None, True, layers=layers)
            for name in units
        ]
    if config.moe.shared_gate:
        gate = f"{prefix}.shared_expert_gate.weight"
        rows.append(Row("blocks/moe/shared_gate/kernel", gate, transpose=True, layers=layers))
    return rows


def _places(names: HfExperts, ours: str, width: int) -> list[dict[str, Any]]:
    """Where a file has the matrices of gate, up and down, or their biases: arguments of `Row`."""
    if not names.is_joined:
        theirs = {"kernel": "weight", "bias": "bias"}[ours]
        return [{"name": f"{{expert}}.{matrix}.{theirs}", "transpose": True} for matrix in names.matrices]
    in_turns, down = (name + {"kernel": "", "bias": "_bias"}[ours] for name in names.matrices)
    both = {"name": in_turns, "axis": {"kernel": 2, "bias": 1}[ours], "groups": width}
    return [dict(both), dict(both), {"name": down}]


def write_experts(config: LlamaConfig, names: HfExperts) -> dict[str, Any]:
    """The keys of a `config.json`. Its balancing loss is as many times larger as a token has experts."""
    moe = config.moe
    assert moe is not None
    values: dict[str, Any] = {
        names.number_key: moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        names.width_key: config.expert_dim,
    }
    if names.deepseek:
        values |= _write_deepseek(config, names.deepseek)
    else:
        values["router_aux_loss_coef"] = moe.aux_loss / moe.experts_per_token
    if names.normalizes is None:
        values["norm_topk_prob"] = moe.normalize
    if names.is_joined:
        values["swiglu_limit"] = moe.gate_limit
    if names.shared == "shared_expert":
        values["shared_expert_intermediate_size"] = moe.shared_experts * config.expert_dim
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
        "normalize": names.normalizes,
        "aux_loss": values.get("router_aux_loss_coef", names.aux_loss) * per_token,
        "z_loss": 0.0,
    }
    if names.normalizes is None:
        settings["normalize"] = values.get("norm_topk_prob", names.deepseek == 3)
    if names.deepseek:
        settings |= _read_deepseek(values, names.deepseek)
    if names.is_joined:
        settings |= {"biases": True, "gate_limit": values.get("swiglu_limit", 7.0)}
    if names.width_key != "intermediate_size":
        settings["intermediate_dim"] = values.get(names.width_key, names.width)
    if names.shared == "shared_expert":
        width, shared = settings["intermediate_dim"], values.get("shared_expert_intermediate_size", names.shared_width)
        if not shared or shared % width:
            raise UserError(
                f"config.json: shared_expert_intermediate_size {shared} is not supported: it has to be a multiple of "
                f"{names.width_key} {width}"
            )
        settings |= {"shared_experts": shared // width, "shared_gate": True}
    return settings


# Keys of DeepSeek's routers that have to have these values, by version.
_DEEPSEEK: dict[int, dict[str, Any]] = {
    2: {"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False, "mlp_bias": False},
    3: {"scoring_func": "sigmoid", "moe_layer_freq": 1, "topk_method": "noaux_tc"},
}


def _write_deepseek(config: LlamaConfig, version: int) -> dict[str, Any]:
    """transformers does not read the coefficient of the balancing loss, which is that of DeepSeek's own files."""
    moe = config.moe
    assert moe is not None
    groups = (moe.num_groups, moe.groups_per_token)
    values = {
        "first_k_dense_replace": len(config.dense_layers),
        "n_shared_experts": moe.shared_experts,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "aux_loss_alpha": moe.aux_loss,
        "seq_aux": True,
        **({"num_nextn_predict_layers": config.mtp.num_modules if config.mtp else 0} if version == 3 else {}),
        **{key: value for key, value in _DEEPSEEK[version].items() if key != "mlp_bias"},
    }
    if version == 2:
        values["topk_method"] = "greedy" if moe.num_groups is None else "group_limited_greedy"
    elif moe.num_groups is None:
        groups = (1, 1)
    return values | dict(zip(("n_group", "topk_group"), groups, strict=True))


def _read_deepseek(values: Values, version: int) -> dict[str, Any]:
    for key, needed in _DEEPSEEK[version].items():
        if values.get(key) not in (None, needed):
            raise UserError(f"config.json: {key} {values[key]} is not supported; expected {needed}")
    groups = {"num_groups": values.get("n_group", 8), "groups_per_token": values.get("topk_group", 4)}
    settings: dict[str, Any] = {
        "first_dense_layers": _first_dense(values, version),
        "shared_experts": values.get("n_shared_experts", 2 if version == 2 else 1),
        "routed_scaling_factor": float(values.get("routed_scaling_factor", 1.0 if version == 2 else 2.5)),
        "aux_loss": values.get("aux_loss_alpha", 0.0),
    }
    if version == 3:
        # a bias that stays as it is
        return settings | {"router": "sigmoid", "bias_update_rate": 0.0} | (groups if groups["num_groups"] != 1 else {})
    method = values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"config.json: topk_method {method} is not supported; expected greedy or group_limited_greedy")
    return settings | (groups if method == "group_limited_greedy" else {})


def _first_dense(values: Values, version: int) -> int:
    return min(values.get("first_k_dense_replace", 0 if version == 2 else 3), values["num_hidden_layers"])


def has_experts(values: Mapping[str, Any], names: HfExperts | None, layer: int) -> bool:
    """Whether a layer of a `config.json` has experts instead of one MLP."""
    if names is not None and names.deepseek:
        return layer >= _first_dense(values, names.deepseek)
    if names is None or not names.can_be_mixed:
        return names is not None
    is_dense = layer in (values.get("mlp_only_layers") or [])
    return not is_dense and (layer + 1) % values.get("decoder_sparse_step", 1) == 0
