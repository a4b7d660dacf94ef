"""Llama and its relatives in the Hugging Face format.

transformers' Linear stores [out, in], so matrices are transposed; heads come first in `out`, as in ours flattened.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Row, Table
from lmtrain.models.hf_settings import SameSetting, from_hf, to_hf
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.rope_config import RopeConfig

DEFAULT_REF = "meta-llama/Llama-2-7b-hf"
HAS_LEARNED_POSITIONS = False
ALWAYS_HAS_BIASES = False
PUBLISHED_DTYPE = "bfloat16"

_L = "model.layers.{layer}."

_LLAMA = {
    "use_qkv_bias": False,
    "sliding_window": False,
    "qk_norm": "none",
    "norm_position": "pre",
    "norm_offset": False,
    "scale_embeddings": False,
    "activation_function": "silu",
}


class _Relative(NamedTuple):
    """A model_type of transformers: its class, the settings in which it differs from Llama, and how it reads a file.

    `has_window` and `has_attention_bias`: its code reads these keys, other kinds ignore them. The others are values of
    keys that a file lacks; of `num_key_value_heads` and `head_dim`, None: that of multi-head attention.
    """

    architecture: str
    settings: dict[str, Any]
    has_window: bool = False
    has_attention_bias: bool = False
    length: int = 2048
    kv_heads: int | None = None
    head_dim: int | None = None
    epsilon: float = 1e-6


_GEMMA = {"scale_embeddings": True, "norm_offset": True, "activation_function": "gelu_new"}
_OLMO2 = {"qk_norm": "all", "norm_position": "post"}
_RELATIVES = {
    "llama": _Relative("LlamaForCausalLM", {}, has_attention_bias=True),
    "mistral": _Relative("MistralForCausalLM", {"sliding_window": True}, has_window=True, length=131_072, kv_heads=8),
    "qwen2": _Relative("Qwen2ForCausalLM", {"use_qkv_bias": True}, has_window=True, length=32_768, kv_heads=32),
    "qwen3": _Relative("Qwen3ForCausalLM", {"qk_norm": "head"}, True, True, 32_768, kv_heads=32, head_dim=128),
    "gemma": _Relative("GemmaForCausalLM", _GEMMA, False, True, 8192, kv_heads=16, head_dim=256),
    "olmo2": _Relative("Olmo2ForCausalLM", _OLMO2, has_attention_bias=True, epsilon=1e-5),
}
MODEL_TYPES = tuple(_RELATIVES)
_SETTINGS = [
    SameSetting("hidden_dim", "hidden_size", None),
    SameSetting("intermediate_dim", "intermediate_size", None),
    SameSetting("num_layers", "num_hidden_layers", None),
    SameSetting("num_heads", "num_attention_heads", None),
    SameSetting("initializer_range", "initializer_range", 0.02),
]
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
    for kind, relative in _RELATIVES.items():
        differ = {name for name, value in (_LLAMA | relative.settings).items() if ours[name] != value}
        if not differ or (kind == "llama" and differ == {"activation_function"}):
            return _check_biases(config, kind)
    unusual = [f"model.{name}: {getattr(config, name)}" for name, value in _LLAMA.items() if ours[name] != value]
    together = " together" if len(unusual) > 1 else ""
    raise UserError(f"{', '.join(unusual)}{together}: transformers has no such model type; cannot be exported")


def _check_biases(config: LlamaConfig, kind: str) -> str:
    if config.use_bias and not _RELATIVES[kind].has_attention_bias:
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
        "architectures": [_RELATIVES[kind].architecture],
        "vocab_size": vocab_size,
        **to_hf(_SETTINGS, config),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_act": _ACTIVATIONS[config.activation_function],
        "hidden_activation": _ACTIVATIONS[config.activation_function],  # the name in gemma
        "max_position_embeddings": config.seq_len,
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
    relative = _RELATIVES[kind]
    missing = [setting.theirs for setting in _SETTINGS if setting.default is None and setting.theirs not in values]
    if missing:
        raise UserError(f"config.json: {', '.join(missing)} missing")
    length = values.get("max_position_embeddings", relative.length)
    if values.get("use_bidirectional_attention") and kind == "gemma":
        raise UserError("config.json: use_bidirectional_attention is not supported; attention is causal")
    return {
        "type": "llama",
        **relative.settings,
        **from_hf(_SETTINGS, values),
        "seq_len": length,
        "num_kv_heads": values.get("num_key_value_heads", relative.kv_heads) or values["num_attention_heads"],
        "head_dim": values.get("head_dim") or relative.head_dim,
        "activation_function": _activation(values),
        "use_bias": relative.has_attention_bias and values.get("attention_bias", False),
        "use_mlp_bias": kind == "llama" and values.get("mlp_bias", False),
        "sliding_window": _window(values),
        "layer_norm_epsilon": values.get("rms_norm_eps", relative.epsilon),
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
    """The sliding window, which must be the same in every layer; None for all keys.

    Only Qwen needs `use_sliding_window`.
    """
    kind, layers = values["model_type"], values["num_hidden_layers"]
    if not _RELATIVES[kind].has_window:
        return None
    window, sliding = values.get("sliding_window", 4096), layers
    if kind != "mistral":
        window = window if values.get("use_sliding_window") else None
        sliding = max(layers - values.get("max_window_layers", 28), 0)
    if values.get("layer_types"):
        sliding = list(values["layer_types"]).count("sliding_attention")
        if sliding and window is None:
            raise UserError(
                "config.json: layer_types has sliding_attention, but there is no sliding window (sliding_window, and "
                "use_sliding_window in Qwen)"
            )
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
