"""RoPE in the `config.json` of Llama and its relatives, in the keys of transformers 4 and 5, in both directions."""

import math
from collections.abc import Mapping
from typing import Any

from lmtrain.models.base_config import RopeConfig
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.relatives import Relative
from lmtrain.runtime.errors import UserError

# By type: the keys that it requires.
_NEEDED = {
    "default": [],
    "linear": ["factor"],
    "dynamic": ["factor"],
    "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
    "yarn": ["factor"],
}
# Values that equal the behavior without them.
_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True}
# Gemma 3's base of sliding layers in transformers 4, and its default.
_LOCAL, _LOCAL_DEFAULT = "rope_local_base_freq", 10_000.0


def write_rope(config: LlamaConfig, relative: Relative) -> dict[str, Any]:
    """The keys of both versions."""
    rope = config.rope
    if rope.type == "dynamic" and rope.original_seq_len not in (None, config.seq_len):
        raise UserError("model.rope.original_seq_len: transformers' dynamic rope starts at seq_len; remove it")
    parameters = _parameters(rope)
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    values = {
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.type == "default" else scaling,
    }
    if relative.nope == "all" and not any(kind.rope for kind in config.kinds if kind.attention != "linear"):
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
    if relative.partial is not None:
        values["partial_rotary_factor"] = rope.partial_rotary_factor
    if relative.local == "no":
        return values
    values["rope_parameters"] = {"full_attention": parameters, "sliding_attention": _parameters(rope.local)}
    return values | ({_LOCAL: rope.local.theta} if relative.local == "any" else {})


def _parameters(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.partial_rotary_factor != 1:
        values["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.type != "default":
        values["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_seq_len
    if rope.type == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    if not rope.truncate:
        values["truncate"] = False
    scales = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    values |= {name: scale for name, scale in scales.items() if scale is not None}
    return values


def read_rope(values: Mapping[str, Any], length: int, relative: Relative) -> dict[str, Any]:
    """The settings of `model.rope` for a maximum of `length` positions, those of sliding layers as `local_theta`."""
    new = values.get("rope_parameters") or ({} if values.get("rope_scaling") else relative.rope)
    if relative.partial is not None:
        # transformers 5 reads it from rope_parameters, or from the file
        new = {name: value for name, value in new.items() if not name.startswith("mrope_")}  # equal without images
        partial = new.pop("partial_rotary_factor", values.get("partial_rotary_factor", relative.partial))
        return _settings(values, new, length, relative.theta) | {"partial_rotary_factor": float(partial)}
    if relative.local == "no":
        return _settings(values, new, length, relative.theta)
    settings = _settings(values, new.get("full_attention") or {}, length, relative.theta)
    local = _settings({}, _sliding(values, new, relative), length, relative.theta)
    if local["type"] != "default":
        raise UserError(f"config.json: rope type {local['type']} in sliding layers is not supported")
    return settings | {"local_theta": local["theta"]}


def _sliding(values: Mapping[str, Any], new: Mapping[str, Any], relative: Relative) -> dict[str, Any]:
    """The `rope_parameters` of sliding layers."""
    sliding = dict(new.get("sliding_attention") or {})
    if relative.local == "any":
        return {"rope_theta": values.get(_LOCAL, _LOCAL_DEFAULT)} | sliding
    theta = values.get("rope_theta")
    if "rope_theta" not in sliding and theta not in (None, relative.theta):
        raise UserError(
            f"config.json: transformers 4 and 5 read rope_theta {theta} differently for sliding layers; add "
            "rope_parameters with sliding_attention and full_attention"
        )
    return {"rope_theta": relative.theta} | sliding


def _settings(values: Mapping[str, Any], new: Mapping[str, Any], length: int, default: float) -> dict[str, Any]:
    """From `rope_scaling` and `rope_theta` (transformers 4), which take precedence over `new` (5)."""
    old = values.get("rope_scaling") or {}
    scaling = dict(old or new)
    theta = scaling.pop("rope_theta", None) or values.get("rope_theta")
    if theta is None and new.get("rope_theta") not in (None, default):
        raise UserError(
            f"config.json: rope_scaling overrides rope_parameters, so that theta is {default:.0f} instead of "
            f"{new['rope_theta']}; add rope_theta to rope_scaling"
        )
    old_name = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", old_name)
    if kind not in _NEEDED:
        raise UserError(
            f"config.json: rope type {kind!r} is not supported; expected default, linear, dynamic, llama3 or yarn"
        )
    settings: dict[str, Any] = {"type": kind, "theta": float(theta or default)}
    given = scaling.pop("original_max_position_embeddings", None) or values.get("original_max_position_embeddings")
    original = given or length
    if kind in ("llama3", "yarn", "dynamic"):
        # transformers' dynamic rope scales beyond the maximum length of the file
        settings["original_seq_len"] = length if kind == "dynamic" else original
    if kind == "yarn" and scaling.get("factor") is None and given:
        scaling["factor"] = length / original
    lacking = [name for name in _NEEDED[kind] if scaling.get(name) is None]
    if lacking:
        raise UserError(f"config.json: rope {kind} requires {', '.join(lacking)}")
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        value = scaling.pop(name, None)
        if value is not None:
            settings[name] = float(value)
    if kind == "yarn" and scaling.get("truncate") is False:
        settings["truncate"] = scaling.pop("truncate")
    neutral: dict[str, Any] = dict(_NEUTRAL)
    attention = scaling.get("attention_factor")
    if kind == "yarn" and attention is not None and abs(attention - 0.1 * math.log(settings["factor"]) - 1) < 1e-6:
        neutral["attention_factor"] = attention
    if not scaling.get("mscale_all_dim"):
        scaling.pop("mscale", None)  # transformers uses both or none, but for the scores of latent attention
    elif kind == "yarn":
        scales = {name: float(scaling.pop(name, None) or 0) for name in ("mscale", "mscale_all_dim")}
        settings |= {name: scale for name, scale in scales.items() if scale}
    rest = {name: value for name, value in scaling.items() if value not in (None, neutral.get(name))}
    if rest:
        raise UserError(f"config.json: rope {kind} with {', '.join(sorted(rest))} is not supported")
    return settings
