"""Llama's relatives in transformers: each model type as the settings in which it differs from Llama."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from lmtrain.models.gated_delta.hf import OLMO_HYBRID, QWEN3_5, QWEN3_NEXT, DeltaForm
from lmtrain.models.gated_delta.hf import differences as delta_differences
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.runtime.errors import UserError

Values = Mapping[str, Any]

# Settings that distinguish the relatives, with Llama's values.
_LLAMA: dict[str, Any] = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_mlp_bias": False,
    "qk_norm": "none",
    "norm_position": "pre",
    "norm_offset": False,
    "scale_embeddings": False,
    "activation_function": "silu",
    "gated_mlp": True,
    "attention_logit_cap": None,
    "final_logit_cap": None,
    "query_pre_attn_scalar": None,
    "final_logit_cap_type": "tanh",
    "use_head_bias": False,
    "attention_gate": False,
    "attention_sinks": False,
    "embedding_norm": False,
}


class HfExperts(NamedTuple):
    """Experts in a model type of transformers: names of weights after those of the layer, of gate, up and down, and
    names of keys. With two names, all experts are in one tensor [experts, in, out], whose outputs are those of gate and
    up in turns, and have biases. `normalizes`: whether `norm_topk_prob` can be set, or is one of its values;
    `can_be_mixed`: some layers may have none; `shared`: the name of shared experts, which have a gate if it is
    `shared_expert`; `deepseek`: the version whose router it has. The others are values of keys that a file lacks.
    """

    prefix: str
    matrices: tuple[str, str, str] | tuple[str, str]
    number_key: str
    width_key: str = "intermediate_size"
    normalizes: bool | None = None
    can_be_mixed: bool = False
    shared: Literal["shared_expert", "shared_experts"] | None = None
    deepseek: Literal[2, 3] | None = None
    router: str = "gate"
    number: int = 8
    per_token: int = 8
    width: int = 768
    shared_width: int = 512
    aux_loss: float = 0.001

    @property
    def is_joined(self) -> bool:
        return len(self.matrices) == 2


class Relative(NamedTuple):
    """A model type of transformers: its class, the `settings` in which it differs from Llama, and how it reads a file.

    `free` are settings that a `config.json` of this type defines. `layers`: whether all layers see all keys, all have a
    window, all are of either kind, or each is; `is_sliding` says which are in a file that does not say it, by layer.
    `is_latent`: it has latent attention. `has_switch`: windows need `use_sliding_window`. `experts`: of a mixture;
    None: the type has none. `local`: what RoPE of its own a sliding layer can have: one that is not `scaled`, or one
    with any base. `linear`: names of its linear layers; None: it has none. `nope`: which layers can have no RoPE.
    `partial`: its `partial_rotary_factor` in a file without one; None: it rotates all of a head. The others are values
    of keys that a file lacks, `rope` those of `rope_parameters`; of `num_key_value_heads` and `head_dim`, None: that of
    multi-head attention.
    """

    architecture: str
    settings: Mapping[str, Any] = MappingProxyType({})
    free: frozenset[str] = frozenset()
    layers: Literal["full", "sliding", "either", "any", "linear"] = "full"
    is_sliding: Callable[[Values, int], bool] = lambda values, layer: False
    has_switch: bool = False
    nope: Literal["none", "each", "all"] = "none"
    linear: DeltaForm | None = None
    is_latent: bool = False
    partial: float | None = None
    experts: HfExperts | None = None
    local: Literal["no", "unscaled", "any"] = "no"
    length: int = 2048
    window: int | None = 4096
    kv_heads: int | None = None
    head_dim: int | None = None
    epsilon: float = 1e-6
    theta: float = 10_000.0
    rope: Mapping[str, Any] = MappingProxyType({})
    is_tied: bool = False


_BIAS = frozenset({"use_bias"})
_BIASES = frozenset({"use_bias", "use_mlp_bias"})
_GEMMA = {"scale_embeddings": True, "norm_offset": True, "activation_function": "gelu_new"}
_OLMO = {"qk_norm": "all", "norm_position": "post"}
_GEMMAS: dict[str, Any] = {"head_dim": 256, "is_tied": True}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_QWENS: dict[str, Any] = {"layers": "any", "has_switch": True, "length": 32_768, "kv_heads": 32}
_GATED = {"qk_norm": "head", "norm_offset": True, "attention_gate": True}
_HYBRIDS: dict[str, Any] = {"layers": "linear", "partial": 0.25, "length": 32_768, "head_dim": 256}
_QWENS |= {"is_sliding": lambda values, layer: layer >= values.get("max_window_layers", 28)}

_SHARED = HfExperts(
    *("mlp", _PROJECTIONS, "num_experts", "moe_intermediate_size"),
    normalizes=True,
    shared="shared_expert",
    number=256,
    width=512,
)

_DEEPSEEK = HfExperts(
    *("mlp", _PROJECTIONS, "n_routed_experts", "moe_intermediate_size"), shared="shared_experts", aux_loss=0.0
)

# Model types of text and images, and the type of their text part, which lmtrain trains.
WITH_IMAGES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

RELATIVES = {
    "llama": Relative("LlamaForCausalLM", free=_BIASES | {"activation_function"}),
    "mistral": Relative(
        "MistralForCausalLM", layers="sliding", is_sliding=lambda values, layer: True, length=131_072, kv_heads=8
    ),
    "qwen2": Relative("Qwen2ForCausalLM", {"use_qkv_bias": True}, **_QWENS),
    "qwen3": Relative("Qwen3ForCausalLM", {"qk_norm": "head"}, _BIAS, head_dim=128, **_QWENS),
    "gemma": Relative("GemmaForCausalLM", _GEMMA, _BIAS, length=8192, kv_heads=16, **_GEMMAS),
    "gemma2": Relative(
        "Gemma2ForCausalLM",
        _GEMMA | {"norm_position": "both"},
        _BIAS | {"attention_logit_cap", "final_logit_cap", "query_pre_attn_scalar"},
        layers="any",
        is_sliding=lambda values, layer: layer % 2 == 0,
        length=8192,
        kv_heads=4,
        **_GEMMAS,
    ),
    "gemma3_text": Relative(
        "Gemma3ForCausalLM",
        _GEMMA | {"norm_position": "both", "qk_norm": "head"},
        _BIAS | {"final_logit_cap", "query_pre_attn_scalar"},
        layers="any",
        is_sliding=lambda values, layer: (layer + 1) % values.get("sliding_window_pattern", 6) != 0,
        local="any",
        length=131_072,
        kv_heads=4,
        theta=1e6,
        **_GEMMAS,
    ),
    "olmo2": Relative("Olmo2ForCausalLM", _OLMO, _BIAS, epsilon=1e-5),
    "olmo3": Relative(
        "Olmo3ForCausalLM",
        _OLMO,
        _BIAS,
        layers="any",
        is_sliding=lambda values, layer: (layer + 1) % 4 != 0,
        local="unscaled",
        epsilon=1e-5,
        theta=5e5,
    ),
    "smollm3": Relative(
        "SmolLM3ForCausalLM",
        free=_BIASES,
        layers="any",
        is_sliding=lambda values, layer: not has_rope(values, layer),
        has_switch=True,
        nope="each",
        length=32_768,
        window=None,
        kv_heads=4,
        theta=2e6,
        is_tied=True,
    ),
    "arcee": Relative(
        "ArceeForCausalLM", {"gated_mlp": False}, _BIASES | {"activation_function"}, length=4096, epsilon=1e-5
    ),
    "mixtral": Relative(
        "MixtralForCausalLM",
        free=frozenset({"activation_function"}),
        layers="either",
        is_sliding=lambda values, layer: True,
        experts=HfExperts("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts", normalizes=True, per_token=2),
        length=131_072,
        window=None,
        kv_heads=8,
        epsilon=1e-5,
        theta=1e6,
    ),
    "qwen3_moe": Relative(
        "Qwen3MoeForCausalLM",
        {"qk_norm": "head"},
        _BIAS | {"activation_function"},
        layers="either",
        is_sliding=lambda values, layer: True,
        has_switch=True,
        experts=HfExperts("mlp", _PROJECTIONS, "num_experts", "moe_intermediate_size", can_be_mixed=True, number=128),
        length=32_768,
        kv_heads=4,
    ),
    "qwen2_moe": Relative(
        "Qwen2MoeForCausalLM",
        {"use_qkv_bias": True},
        frozenset({"activation_function"}),
        layers="any",
        is_sliding=lambda values, layer: layer % 2 == 0 and layer < values.get("max_window_layers", 28),
        has_switch=True,
        experts=HfExperts(
            *("mlp", _PROJECTIONS, "num_experts", "moe_intermediate_size"),
            can_be_mixed=True,
            shared="shared_expert",
            number=60,
            per_token=4,
            width=1408,
            shared_width=5632,
        ),
        length=32_768,
        kv_heads=16,
    ),
    "qwen3_next": Relative(
        "Qwen3NextForCausalLM",
        _GATED,
        _BIAS,
        linear=QWEN3_NEXT,
        experts=_SHARED._replace(can_be_mixed=True, normalizes=None, number=512, per_token=10),
        kv_heads=2,
        **_HYBRIDS,
    ),
    "qwen3_5_text": Relative("Qwen3_5ForCausalLM", _GATED, _BIAS, linear=QWEN3_5, kv_heads=4, **_HYBRIDS),
    "qwen3_5_moe_text": Relative(
        "Qwen3_5MoeForCausalLM", _GATED, _BIAS, linear=QWEN3_5, experts=_SHARED, kv_heads=2, **_HYBRIDS
    ),
    "olmo_hybrid": Relative(
        "OlmoHybridForCausalLM", _OLMO, _BIAS, layers="linear", nope="all", linear=OLMO_HYBRID, length=65_536
    ),
    "gpt_oss": Relative(
        "GptOssForCausalLM",
        {"attention_sinks": True, "use_bias": True},
        _BIAS,
        layers="any",
        is_sliding=lambda values, layer: layer % 2 == 0,
        experts=HfExperts(
            *("mlp", ("gate_up_proj", "down_proj"), "num_local_experts"),
            normalizes=True,
            router="router",
            number=128,
            per_token=4,
        ),
        length=131_072,
        window=128,
        kv_heads=8,
        head_dim=64,
        epsilon=1e-5,
        theta=150_000.0,
        rope=MappingProxyType(
            {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
        ),
    ),
    "deepseek_v2": Relative(
        "DeepseekV2ForCausalLM",
        free=_BIAS | {"activation_function"},
        is_latent=True,
        experts=_DEEPSEEK._replace(normalizes=False, deepseek=2, number=64, width=1407),
    ),
    "deepseek_v3": Relative(
        "DeepseekV3ForCausalLM",
        free=_BIAS | {"activation_function"},
        is_latent=True,
        experts=_DEEPSEEK._replace(deepseek=3, number=256, width=2048),
        length=4096,
    ),
    "olmoe": Relative(
        "OlmoeForCausalLM",
        {"qk_norm": "all"},
        _BIAS | {"activation_function"},
        experts=HfExperts("mlp", _PROJECTIONS, "num_experts", number=64, aux_loss=0.01),
        length=4096,
        epsilon=1e-5,
    ),
}

# Model types that users look for, and what lmtrain lacks for them.
UNSUPPORTED = {
    "granitemoe": "multipliers of embeddings, attention, residuals and logits",
}


def has_rope(values: Values, layer: int) -> bool:
    """Whether a layer of a `config.json` has rotary positions, in the types that have layers without."""
    listed = values.get("no_rope_layers")
    if listed is not None and layer >= len(listed):
        raise UserError(f"config.json: no_rope_layers has {len(listed)} layers, num_hidden_layers more")
    return bool(listed[layer]) if listed is not None else (layer + 1) % values.get("no_rope_layer_interval", 4) != 0


def relative_of(config: LlamaConfig) -> str:
    """The model type of transformers that has these settings. Raises `UserError` naming them if there is none."""
    ours = _own_settings(config)
    differences = {kind: _differences(config, ours, relative) for kind, relative in RELATIVES.items()}
    for kind, differ in differences.items():
        if not differ:
            return kind
    closest = min(reversed(differences), key=lambda kind: _distance(differences[kind]))
    unusual = [name for name, value in _LLAMA.items() if ours[name] != value]
    named = [f"model.{name}: {ours[name]}" for name in unusual]
    if config.latent_attention is not None:
        named.append("model.latent_attention")
    if config.linear_attention is not None:
        named += [f"model.{name}" for name in sorted(differences[closest]) if name.startswith("linear_attention")] or [
            "model.linear_attention"
        ]
    named += ["model.layer_pattern"] * bool(differences[closest] & {"layer_pattern"})
    named += [f"model.{name}" for name in sorted(differences[closest]) if name.startswith("moe")]
    named += [f"model.{name}" for name in sorted(differences[closest]) if name.startswith("rope")]
    raise UserError(
        f"{', '.join(named)}{' together' if len(named) > 1 else ''}: transformers has no such model type, so that the "
        f"model cannot be exported; {closest} is closest, but for {', '.join(sorted(differences[closest]))}"
    )


def _distance(differ: set[str]) -> tuple[bool, bool, int]:
    return "moe" in differ, bool(differ & {"linear_attention", "latent_attention"}), len(differ)


def is_of_type(config: LlamaConfig, relative: Relative) -> bool:
    """Whether a model type of transformers has these settings."""
    return not _differences(config, _own_settings(config), relative)


def _own_settings(config: LlamaConfig) -> dict[str, Any]:
    """The settings that distinguish the relatives."""
    ours = {name: getattr(config, name) for name in _LLAMA}
    if (attention := config.attention_layers) and config.linear_attention is not None:
        ours["norm_position"] = config.kinds[attention[0]].norm_position
    return ours | ({"query_pre_attn_scalar": None} if config.query_scalar == config.head_width else {})


def _differences(config: LlamaConfig, ours: Mapping[str, Any], relative: Relative) -> set[str]:
    """The settings that this type does not have."""
    differ = {
        name
        for name, value in (_LLAMA | dict(relative.settings)).items()
        if name not in relative.free and ours[name] != value
    }
    windows = {"full": {False}, "linear": {False}, "sliding": {True}}.get(relative.layers, {False, True})
    found = {window is not None for window in config.windows}
    if not found <= windows or (relative.layers == "either" and len(found) > 1):
        differ.add("sliding_window" if config.layer_pattern is None else "layer_pattern")
    differ |= _linear_differences(config, relative)
    if (config.latent_attention is not None) != relative.is_latent:
        differ.add("latent_attention")
    without = {not kind.rope for kind in config.kinds if kind.attention != "linear"}
    if (relative.nope == "none" and True in without) or (relative.nope == "all" and len(without) > 1):
        differ.add("layer_pattern")
    differ |= _expert_differences(config, relative.experts)
    if config.rope.partial_rotary_factor != 1 and relative.partial is None:
        differ.add("rope.partial_rotary_factor")
    if not _has_local_rope(config, relative):
        differ.add("rope.local_theta")
    return differ


def _linear_differences(config: LlamaConfig, relative: Relative) -> set[str]:
    """Those of linear layers, and of norms that are elsewhere in some layers."""
    form, own = relative.linear, config.linear_attention
    found = {(kind.attention == "linear", kind.norm_position) for kind in config.kinds}
    expected = relative.settings.get("norm_position", "pre")
    in_linear = expected if form is None or form.norms is None else "pre"
    differ = {"layer_pattern"} if not found <= {(False, expected), (True, in_linear)} else set()
    if form is None or own is None:
        return differ | ({"linear_attention"} if (form is None) != (own is None) else set())
    if form.norms is not None and not config.attention_layers:
        differ.add("layer_pattern")
    return differ | delta_differences(own, form, config.layer_norm_epsilon)


def _expert_differences(config: LlamaConfig, experts: HfExperts | None) -> set[str]:
    moe = config.moe
    if moe is None or experts is None:
        return set() if moe is None and experts is None else {"moe"}
    lacking = {
        "moe.router": (moe.router == "sigmoid") != (experts.deepseek == 3),
        "moe.normalize": moe.normalize == (experts.normalizes is False) and experts.normalizes is not None,
        "moe.shared_experts": (moe.shared_experts > 0) != (experts.shared is not None),
        "moe.shared_gate": moe.shared_gate != (experts.shared == "shared_expert"),
        "moe.bias_update_rate": (moe.bias_update_rate is not None) != (experts.deepseek == 3),
        "moe.num_groups": moe.num_groups is not None and experts.deepseek is None,
        "moe.biases": moe.biases != experts.is_joined,
        "moe.gate_limit": (moe.gate_limit is not None) != experts.is_joined,
        "layer_pattern": not experts.can_be_mixed and not _begins_with(config.dense_layers, experts.deepseek),
    }
    return {name for name, differs in lacking.items() if differs}


def _begins_with(dense: tuple[int, ...], deepseek: int | None) -> bool:
    """Whether these are the layers without experts of a type that has none, or only the first ones."""
    return dense == (tuple(range(len(dense))) if deepseek else ())


def _has_local_rope(config: LlamaConfig, relative: Relative) -> bool:
    """Whether this type has the RoPE of the sliding layers, if there are any."""
    rope = config.rope
    if not any(config.windows):
        return True
    if relative.local == "no":
        return rope.local.meaning() == rope.meaning()
    if rope.local_theta is None:
        return rope.type == "default"
    return relative.local == "any" or rope.local_theta == rope.theta
