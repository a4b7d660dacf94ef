"""Llama and its relatives in the Hugging Face format.

transformers' Linear stores [out, in], so matrices are transposed; heads come first in `out`, as in ours flattened.
"""

from collections.abc import Mapping
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Row, Table
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.rope_config import RopeConfig

DEFAULT_REF = "meta-llama/Llama-2-7b-hf"
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2")
HAS_LEARNED_POSITIONS = False
ALWAYS_HAS_BIASES = False

_L = "model.layers.{layer}."

# Settings in which a relative differs from Llama; all others must be as in Llama.
_RELATIVES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": True},
    "qwen2": {"use_qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "gemma": {"scale_embeddings": True, "norm_offset": True, "activation_function": "gelu_new"},
    "olmo2": {"qk_norm": "all", "norm_position": "post"},
}
_LLAMA = {
    "use_qkv_bias": False,
    "sliding_window": False,
    "qk_norm": "none",
    "norm_position": "pre",
    "norm_offset": False,
    "scale_embeddings": False,
    "activation_function": "silu",
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
_HAS_ATTENTION_BIAS = {"llama", "qwen3", "gemma", "olmo2"}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "relu": "relu"}


def reads(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this family."""
    return values.get("model_type") in MODEL_TYPES


def table(config: LlamaConfig) -> Table:
    """The table of weights of this config."""
    post = config.norm_position == "post"
    norms = ("post_attention_layernorm", "post_feedforward_layernorm" if post else None)
    first, second = norms if post else ("input_layernorm", "post_attention_layernorm")
    rows = [
        Row("tokens/embedding", "model.embed_tokens.weight", vocab=True),
        Row("norm_final/scale", "model.norm.weight"),
        Row("blocks/norm_attn/scale", f"{_L}{first}.weight"),
        Row("blocks/norm_mlp/scale", f"{_L}{second}.weight"),
        Row("blocks/attn/out/kernel", _L + "self_attn.o_proj.weight", rows=2, transpose=True),
    ]
    rows += [
        Row(f"blocks/attn/{name}/kernel", f"{_L}self_attn.{name}_proj.weight", rows=1, transpose=True) for name in "qkv"
    ]
    mlp = ("gate", "up", "down")
    rows += [Row(f"blocks/mlp/{name}/kernel", f"{_L}mlp.{name}_proj.weight", transpose=True) for name in mlp]
    if config.use_bias or config.use_qkv_bias:
        rows += [Row(f"blocks/attn/{name}/bias", f"{_L}self_attn.{name}_proj.bias", rows=0) for name in "qkv"]
    if config.use_bias:
        rows.append(Row("blocks/attn/out/bias", _L + "self_attn.o_proj.bias"))
    if config.use_mlp_bias:
        rows += [Row(f"blocks/mlp/{name}/bias", f"{_L}mlp.{name}_proj.bias") for name in mlp]
    if config.qk_norm != "none":
        rows += [Row(f"blocks/attn/norm_{name}/scale", f"{_L}self_attn.{name}_norm.weight", rows=0) for name in "qk"]
    if not config.tie_word_embeddings:
        rows.append(Row("unembed/embedding", "lm_head.weight", vocab=True))
    return rows


def canonical(name: str) -> str | None:
    """A tensor's name as in `table`; None for tables of frequencies in old files."""
    return None if name.endswith("rotary_emb.inv_freq") else name


def model_type(config: LlamaConfig) -> str:
    """The model_type of transformers. Raises `UserError` naming the setting if there is none."""
    ours = {name: getattr(config, name) for name in _LLAMA} | {"sliding_window": config.sliding_window is not None}
    for kind, special in _RELATIVES.items():
        if ours == _LLAMA | special or (kind == "llama" and _only_activation_differs(ours)):
            return _check_biases(config, kind)
    unusual = [f"model.{name}: {getattr(config, name)}" for name, value in _LLAMA.items() if ours[name] != value]
    together = " together" if len(unusual) > 1 else ""
    raise UserError(f"{', '.join(unusual)}{together}: transformers has no such model type; cannot be exported")


def _only_activation_differs(ours: dict[str, Any]) -> bool:
    return ours | {"activation_function": "silu"} == _LLAMA


def _check_biases(config: LlamaConfig, kind: str) -> str:
    if config.use_bias and kind not in _HAS_ATTENTION_BIAS:
        raise UserError(f"model.use_bias: transformers' {kind} has no such biases; cannot be exported")
    if config.use_mlp_bias and kind != "llama":
        raise UserError(f"model.use_mlp_bias: transformers' {kind} has no such biases; cannot be exported")
    if config.rope.type == "dynamic" and config.rope.original_seq_len not in (None, config.seq_len):
        raise UserError("model.rope.original_seq_len: transformers' dynamic rope starts at seq_len; remove it")
    return kind


def to_hf_config(config: LlamaConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The `config.json`, for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`)."""
    kind = model_type(config)
    rope = _rope_parameters(config.rope)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    values: dict[str, Any] = {
        "model_type": kind,
        "architectures": [_CLASSES[kind]],
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.intermediate_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": _ACTIVATIONS[config.activation_function],
        "hidden_activation": _ACTIVATIONS[config.activation_function],  # the name in gemma
        "max_position_embeddings": config.seq_len,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.use_bias,
        "mlp_bias": config.use_mlp_bias,
        "rope_parameters": rope,
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.type == "default" else scaling,
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
        "pad_token_id": None,
    }
    if kind == "mistral":
        values["sliding_window"] = config.sliding_window
    return values


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        values["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = rope.original_seq_len
    if rope.type == "llama3":
        values |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return values


def from_hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes. Raises `UserError` for unsupported ones."""
    kind = values["model_type"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in sizes if name not in values]
    if missing:
        raise UserError(f"config.json: {', '.join(missing)} missing")
    length = values.get("max_position_embeddings", 2048)
    special = {name: value for name, value in _RELATIVES[kind].items() if name != "sliding_window"}
    return {
        "type": "llama",
        **special,
        "seq_len": length,
        "hidden_dim": values["hidden_size"],
        "intermediate_dim": values["intermediate_size"],
        "num_layers": values["num_hidden_layers"],
        "num_heads": values["num_attention_heads"],
        "num_kv_heads": values.get("num_key_value_heads") or values["num_attention_heads"],
        "head_dim": values.get("head_dim") or {"gemma": 256, "qwen3": 128}.get(kind),
        "activation_function": _activation(values),
        "use_bias": kind in _HAS_ATTENTION_BIAS and values.get("attention_bias", False),
        "use_mlp_bias": values.get("mlp_bias", False),
        "sliding_window": _window(values),
        "layer_norm_epsilon": values.get("rms_norm_eps", 1e-5 if kind == "olmo2" else 1e-6),
        "initializer_range": values.get("initializer_range", 0.02),
        "tie_word_embeddings": values.get("tie_word_embeddings", kind == "gemma"),
        "rope": _rope_settings(values, length),
    }


_ACTIVATIONS_FROM = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {"swish": "silu", "gelu_new": "gelu_new"}


def _activation(values: Mapping[str, Any]) -> str:
    """Our name of the activation function that transformers reads from `hidden_act`.

    Gemma's first files have `gelu` for its approximation; only for Gemma transformers 4 reads `hidden_activation`.
    """
    is_gemma = values["model_type"] == "gemma"
    given = [values.get("hidden_act"), values.get("hidden_activation") if is_gemma else None]
    names = [str(name) for name in given if name is not None] or ["gelu_pytorch_tanh" if is_gemma else "silu"]
    for name in names:
        if name not in _ACTIVATIONS_FROM:
            raise UserError(
                f"config.json: hidden_act {name} is not supported; expected one of {', '.join(_ACTIVATIONS_FROM)}"
            )
    ours = {_ACTIVATIONS_FROM["gelu_pytorch_tanh" if is_gemma and name == "gelu" else name] for name in names}
    if len(ours) > 1:
        raise UserError(f"config.json: hidden_act {names[0]} and hidden_activation {names[1]} contradict one another")
    return ours.pop()


def _window(values: Mapping[str, Any]) -> int | None:
    """The sliding window, which must be the same in every layer; None for all keys."""
    layers = values["num_hidden_layers"]
    if values["model_type"] == "mistral":
        window = values.get("sliding_window", 4096)
        sliding = layers
    else:
        window = values.get("sliding_window", 4096) if values.get("use_sliding_window") else None
        sliding = max(layers - values.get("max_window_layers", 28), 0)
    if values.get("layer_types"):
        sliding = list(values["layer_types"]).count("sliding_attention")
    if window is None or sliding == 0:
        return None
    if sliding < layers:
        raise UserError(f"config.json: a sliding window in {sliding} of {layers} layers only is not supported")
    return int(window)


def _rope_settings(values: Mapping[str, Any], length: int) -> dict[str, Any]:
    """From `rope_scaling` and `rope_theta` (transformers 4), which take precedence over `rope_parameters` (5)."""
    old, new = values.get("rope_scaling") or {}, values.get("rope_parameters") or {}
    scaling = dict(old or new)
    theta = scaling.pop("rope_theta", None) or values.get("rope_theta")
    if theta is None and new.get("rope_theta") not in (None, _THETA):
        raise UserError(
            f"config.json: rope_scaling overrides rope_parameters, so that theta is {_THETA:.0f} instead of "
            f"{new['rope_theta']}; add rope_theta to rope_scaling"
        )
    old_name = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", old_name)
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        raise UserError(
            f"config.json: rope type {kind!r} is not supported; expected default, linear, dynamic, llama3 or yarn"
        )
    settings: dict[str, Any] = {"type": kind, "theta": float(theta or _THETA)}
    given = scaling.pop("original_max_position_embeddings", None) or values.get("original_max_position_embeddings")
    original = given or length
    if kind in ("llama3", "yarn", "dynamic"):
        # transformers' dynamic rope scales beyond the maximum length of the file
        settings["original_seq_len"] = length if kind == "dynamic" else original
    if kind == "yarn" and scaling.get("factor") is None and given:
        scaling["factor"] = length / original
    needed = {"default": [], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}.get(kind, ["factor"])
    lacking = [name for name in needed if scaling.get(name) is None]
    if lacking:
        raise UserError(f"config.json: rope {kind} requires {', '.join(lacking)}")
    for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
        value = scaling.pop(name, None)
        if value is not None:
            settings[name] = float(value)
    rest = {name: value for name, value in scaling.items() if value not in (None, _NEUTRAL.get(name))}
    if rest:
        raise UserError(f"config.json: rope {kind} with {', '.join(sorted(rest))} is not supported")
    return settings


_THETA = 10_000.0  # the default

# Values that equal the behavior without them.
_NEUTRAL = {"partial_rotary_factor": 1.0, "truncate": True}
