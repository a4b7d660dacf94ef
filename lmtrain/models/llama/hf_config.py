"""The `config.json` of Llama and its relatives, in both directions."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmtrain.models.base_config import SameSetting, from_hf, to_hf
from lmtrain.models.gated_delta.hf import read_sizes, write_sizes
from lmtrain.models.latent.hf import read_latent, write_latent
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.hf_experts import has_experts, read_experts, write_experts
from lmtrain.models.llama.hf_rope import read_rope, write_rope
from lmtrain.models.llama.layer_kinds import LayerKind, shortest_period
from lmtrain.models.llama.relatives import RELATIVES, WITH_IMAGES, Relative, Values, has_rope, relative_of
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

_SETTINGS = [
    SameSetting("hidden_dim", "hidden_size", None),
    SameSetting("intermediate_dim", "intermediate_size", None),
    SameSetting("num_layers", "num_hidden_layers", None),
    SameSetting("num_heads", "num_attention_heads", None),
    SameSetting("initializer_range", "initializer_range", 0.02),
]
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_pytorch_tanh", "relu": "relu", "relu2": "relu2"}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def to_hf_config(config: LlamaConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The `config.json`, for transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`)."""
    kind = relative_of(config)
    relative, own, latent = RELATIVES[kind], config.linear_attention, config.latent_attention
    return {
        "model_type": kind,
        "architectures": [relative.architecture],
        "vocab_size": vocab_size,
        **to_hf(_SETTINGS, config),
        **({} if relative.experts is None else write_experts(config, relative.experts)),
        **({} if own is None or relative.linear is None else write_sizes(own, relative.linear)),
        "num_key_value_heads": config.kv_heads,
        **({"head_dim": config.head_width} if latent is None else write_latent(latent)),
        "hidden_act": _ACTIVATIONS[config.activation_function],
        "hidden_activation": _ACTIVATIONS[config.activation_function],  # the name in gemma
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.layer_norm_epsilon,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.use_bias,
        "mlp_bias": config.use_mlp_bias,
        **write_rope(config, relative),
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
        "pad_token_id": None,
        **_write_layers(config, relative),
        **_write_scores(config, relative),
    }


def _write_layers(config: LlamaConfig, relative: Relative) -> dict[str, Any]:
    """Which layers have windows and positions. Types with a switch have no windows without it."""
    is_sliding = [window is not None for window in config.windows]
    values: dict[str, Any] = {}
    if any(is_sliding) or (relative.layers in ("any", "either") and not relative.has_switch):
        values["sliding_window"] = config.sliding_window
    if relative.layers == "any" and (any(is_sliding) or not relative.has_switch):
        values["layer_types"] = [_SLIDING if sliding else _FULL for sliding in is_sliding]
    if relative.has_switch and any(is_sliding):
        values |= {"use_sliding_window": True, "max_window_layers": is_sliding.index(True)}
    if relative.layers == "linear":
        values["layer_types"] = [_LINEAR if kind.attention == "linear" else _FULL for kind in config.kinds]
    if relative.nope == "each":
        values["no_rope_layers"] = [int(kind.rope) for kind in config.kinds]
    return values


def _write_scores(config: LlamaConfig, relative: Relative) -> dict[str, Any]:
    """Caps and scale of scores, in the types that have them."""
    if "query_pre_attn_scalar" not in relative.free:
        return {}
    scalar = config.query_scalar
    if scalar != int(scalar):
        raise UserError(f"model.query_pre_attn_scalar: {scalar}: transformers takes only whole numbers")
    values = {
        "query_pre_attn_scalar": int(scalar),
        "attn_logit_softcapping": config.attention_logit_cap,
        "final_logit_softcapping": config.final_logit_cap,
    }
    # other implementations of transformers leave the cap out
    return values | ({} if config.attention_logit_cap is None else {"_attn_implementation": "eager"})


def from_hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes. Raises `UserError` for unsupported ones."""
    kind = values["model_type"]
    if kind in WITH_IMAGES:
        log.info(f"config.json: {kind}: its text part is used, without images")
        tied = {"tie_word_embeddings": values.get("tie_word_embeddings", False)}
        values, kind = (
            tied | dict(values.get("text_config") or {}) | {"model_type": WITH_IMAGES[kind]},
            WITH_IMAGES[kind],
        )
    relative = RELATIVES[kind]
    if relative.experts is not None and not relative.experts.can_be_mixed:  # a file may lack what it does not use
        values = {"intermediate_size": values.get(relative.experts.width_key)} | dict(values)
    missing = [setting.theirs for setting in _SETTINGS if setting.default is None and setting.theirs not in values]
    if missing:
        raise UserError(f"config.json: {', '.join(missing)} missing")
    length = values.get("max_position_embeddings", relative.length)
    if values.get("use_bidirectional_attention") and kind.startswith("gemma"):
        raise UserError("config.json: use_bidirectional_attention is not supported; attention is causal")
    if rate := values.get("attention_dropout"):
        log.warning(f"config.json: attention_dropout {rate} is not supported: training has no dropout on attention")
    settings: dict[str, Any] = {
        "type": "llama",
        **relative.settings,
        **from_hf(_SETTINGS, values),
        "seq_len": length,
        "num_kv_heads": values.get("num_key_value_heads", relative.kv_heads) or values["num_attention_heads"],
        "head_dim": values.get("head_dim") or relative.head_dim,
        "activation_function": _activation(values),
        "use_bias": "use_bias" in relative.free
        and values.get("attention_bias", relative.settings.get("use_bias", False)),
        "use_mlp_bias": "use_mlp_bias" in relative.free and values.get("mlp_bias", False),
        **_layers(values, relative),
        **({} if relative.experts is None else {"moe": read_experts(values, relative.experts)}),
        **({} if relative.linear is None else {"linear_attention": read_sizes(values, relative.linear)}),
        **(read_latent(values) if relative.is_latent else {}),
        "layer_norm_epsilon": values.get("rms_norm_eps", relative.epsilon),
        "tie_word_embeddings": values.get("tie_word_embeddings", relative.is_tied),
        "rope": read_rope(values, length, relative),
    }
    rotated = _rotated(settings)
    if "sliding" not in rotated:
        settings["rope"].pop("local_theta", None)
    elif rotated == {"sliding"} and "local_theta" in settings["rope"]:
        settings["rope"] = {"type": "default", "theta": settings["rope"]["local_theta"]}
    if not rotated:
        settings["rope"] = {}
    if "query_pre_attn_scalar" in relative.free:
        settings["query_pre_attn_scalar"] = values.get("query_pre_attn_scalar", 256)
        settings["final_logit_cap"] = values.get("final_logit_softcapping", 30.0 if kind == "gemma2" else None)
    if "attention_logit_cap" in relative.free:
        settings["attention_logit_cap"] = values.get("attn_logit_softcapping", 50.0)
    return settings


def _rotated(settings: Mapping[str, Any]) -> set[str]:
    """The kinds of attention of layers with RoPE."""
    pattern = settings["layer_pattern"] or ["full" if settings["sliding_window"] is None else "sliding"]
    kinds = [LayerKind.model_validate(kind if isinstance(kind, dict) else {"attention": kind}) for kind in pattern]
    return {kind.attention for kind in kinds if kind.rope}


_ACTIVATIONS_FROM = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {"swish": "silu", "gelu_new": "gelu_new"}


def _activation(values: Mapping[str, Any]) -> str:
    """Our name of the activation function that transformers reads from `hidden_act`.

    Gemma's first files have `gelu` for its approximation; only for Gemma transformers 4 reads `hidden_activation`.
    """
    kind = values["model_type"]
    is_gemma = kind.startswith("gemma")
    default = {"gemma": "gelu_pytorch_tanh", "arcee": "relu2"}.get(kind[:5], "silu")
    given = [values.get("hidden_act"), values.get("hidden_activation") if is_gemma else None]
    if is_gemma and kind != "gemma":  # the later ones read one name only
        given = given[1:]
    names = [str(name) for name in given if name is not None] or [default]
    for name in names:
        if name not in _ACTIVATIONS_FROM:
            raise UserError(
                f"config.json: hidden_act {name} is not supported; expected one of {', '.join(_ACTIVATIONS_FROM)}"
            )
    ours = {_ACTIVATIONS_FROM["gelu_pytorch_tanh" if kind == "gemma" and name == "gelu" else name] for name in names}
    if len(ours) > 1:
        raise UserError(f"config.json: hidden_act {names[0]} and hidden_activation {names[1]} contradict one another")
    return ours.pop()


def _layers(values: Mapping[str, Any], relative: Relative) -> dict[str, Any]:
    """The window, and the pattern of layers if they differ."""
    layers = range(values["num_hidden_layers"])
    window = values.get("sliding_window", relative.window)
    if relative.has_switch and not values.get("use_sliding_window"):
        window = None
    types = values.get("layer_types") if relative.layers in ("any", "sliding") else None
    if types:
        is_sliding = _are_sliding(types, len(layers), window)
    else:
        is_sliding = [window is not None and relative.is_sliding(values, layer) for layer in layers]
    if relative.layers == "sliding" and len(set(is_sliding)) > 1:
        number = sum(is_sliding)
        raise UserError(f"config.json: a sliding window in {number} of {len(layers)} layers only is not supported")
    is_linear = _are_linear(values, relative)
    rotated = [linear or _is_rotated(values, relative, layer) for layer, linear in zip(layers, is_linear, strict=True)]
    mixed = [has_experts(values, relative.experts, layer) for layer in layers]
    if relative.experts is not None and not any(mixed):
        raise UserError("config.json: no layer has experts")
    can_be_dense = relative.experts is not None and relative.experts.can_be_mixed
    kinds = [
        LayerKind(
            attention="linear" if linear else "sliding" if sliding else "full",
            rope=rope,
            mlp="dense" if can_be_dense and not mixes else None,
            norm_position="pre" if linear and relative.linear and relative.linear.norms else None,
        )
        for linear, sliding, rope, mixes in zip(is_linear, is_sliding, rotated, mixed, strict=True)
    ]
    pattern = shortest_period(kinds)
    is_uniform = len(pattern) == 1 and all(rotated) and not any(is_linear)
    return {
        "sliding_window": int(window) if window is not None and any(is_sliding) else None,
        "layer_pattern": None if is_uniform else [kind.model_dump(exclude_none=True) for kind in pattern],
    }


def _is_rotated(values: Values, relative: Relative, layer: int) -> bool:
    if relative.nope == "all":
        # null in a file without rope_theta is transformers' default base
        return (values.get("rope_parameters") or values).get("rope_theta", relative.theta) is not None
    return relative.nope == "none" or has_rope(values, layer)


def _are_linear(values: Values, relative: Relative) -> list[bool]:
    number: int = values["num_hidden_layers"]
    if relative.linear is None:
        return [False] * number
    types = values.get("layer_types")
    if types is None:
        interval = values.get("full_attention_interval", 4)
        found = [(layer + 1) % interval != 0 for layer in range(number)]
        return found if not relative.linear.norms or not all(found) else [*found[:-1], False]
    _check_types(types, number, _LINEAR)
    is_linear = [name == _LINEAR for name in types]
    if not any(is_linear):
        raise UserError(f"config.json: layer_types has no {_LINEAR}")
    return is_linear


def _check_types(types: Sequence[str], layers: int, other: str) -> None:
    if len(types) != layers:
        raise UserError(f"config.json: layer_types has {len(types)} layers, num_hidden_layers is {layers}")
    if unknown := sorted(set(types) - {_FULL, other}):
        raise UserError(f"config.json: layer_types has {', '.join(unknown)}; supported are {_FULL} and {other}")


def _are_sliding(types: Sequence[str], layers: int, window: Any) -> list[bool]:
    _check_types(types, layers, _SLIDING)
    if _SLIDING in types and window is None:
        raise UserError(
            "config.json: layer_types has sliding_attention, but there is no sliding window (sliding_window, and "
            "use_sliding_window in Qwen)"
        )
    return [name == _SLIDING for name in types]
