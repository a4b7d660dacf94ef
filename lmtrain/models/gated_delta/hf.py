"""Gated DeltaNet in the Hugging Face format: the keys of its sizes, and its tensors as three model types name them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lmtrain.hf.key_map import Row
from lmtrain.models.base_config import SameSetting
from lmtrain.models.gated_delta.config import GatedDeltaConfig

SETTINGS = [
    SameSetting("num_key_heads", "linear_num_key_heads", 16),
    SameSetting("num_value_heads", "linear_num_value_heads", 32),
    SameSetting("key_head_dim", "linear_key_head_dim", 128),
    SameSetting("value_head_dim", "linear_value_head_dim", 128),
    SameSetting("conv_kernel_dim", "linear_conv_kernel_dim", 4),
]


class DeltaForm(NamedTuple):
    """Names of a model type: modules of projections and convolutions, each with our layers that its tensor joins, and
    of the others. `is_by_head`: joined projections have the rows of a key head, with its value heads, together.
    `norms`: ours and theirs around a linear layer, where they are others than around attention. `has_sign`: the type
    has `negative_eigenvalues`; `epsilon`: that of the norm of outputs; None: that of all norms.
    """

    name: str
    projections: Mapping[str, str]
    convolutions: Mapping[str, str] = MappingProxyType({"conv1d": "qkv"})
    out: str = "out_proj"
    norm: str = "norm"
    is_by_head: bool = False
    norms: Mapping[str, str] | None = None
    has_sign: bool = False
    epsilon: float | None = None


QWEN3_NEXT = DeltaForm("qwen3_next", {"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}, is_by_head=True)
QWEN3_5 = DeltaForm("qwen3_5", {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"})
OLMO_HYBRID = DeltaForm(
    "olmo_hybrid",
    {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"},
    {"q_conv1d": "q", "k_conv1d": "k", "v_conv1d": "v"},
    out="o_proj",
    norm="o_norm",
    norms={"norm_attn": "attention_layer_norm", "norm_mlp": "feedforward_layer_norm"},
    has_sign=True,
    epsilon=1e-5,
)
FORMS = {form.name: form for form in (QWEN3_NEXT, QWEN3_5, OLMO_HYBRID)}


def delta_rows(config: GatedDeltaConfig, form: DeltaForm, prefix: str, layers: Sequence[int]) -> list[Row]:
    """The rows of the linear `layers`; `prefix` begins the names of a layer."""
    ours, theirs, where = "blocks/delta/", f"{prefix}linear_attn.", tuple(layers)
    groups = config.num_key_heads if form.is_by_head else 1
    rows = [
        Row(f"{ours}{name}/kernel", f"{theirs}{module}.weight", rows=1, transpose=True, layers=where, groups=groups)
        for module, names in form.projections.items()
        for name in names
    ]
    rows += [
        Row(f"{ours}conv_{name}", f"{theirs}{module}.weight", rows=1, transpose=True, layers=where, has_middle=True)
        for module, names in form.convolutions.items()
        for name in names
    ]
    return [
        *rows,
        Row(f"{ours}a_log", f"{theirs}A_log", layers=where, exact=True),
        Row(f"{ours}dt_bias", f"{theirs}dt_bias", layers=where, exact=True),
        Row(f"{ours}norm_out/scale", f"{theirs}{form.norm}.weight", rows=0, layers=where),
        Row(f"{ours}out/kernel", f"{theirs}{form.out}.weight", rows=2, transpose=True, layers=where),
    ]


def read_sizes(values: Mapping[str, Any], form: DeltaForm) -> dict[str, Any]:
    """The settings of `model.linear_attention` that a `config.json` describes."""
    found = {setting.ours: values.get(setting.theirs) for setting in SETTINGS}
    if form.has_sign:
        heads, width = values["num_attention_heads"], values["hidden_size"]
        keys = found["num_key_heads"] or heads
        found = {"num_value_heads": heads, "key_head_dim": int(0.75 * width / keys)} | _given(found)
        found = {"value_head_dim": 2 * found["key_head_dim"], "num_key_heads": keys} | found
        found["negative_eigenvalues"] = values.get("linear_allow_neg_eigval", True)
    defaults: dict[str, Any] = {setting.ours: setting.default for setting in SETTINGS}
    defaults["weight_format"] = form.name
    return defaults | _given(found) | ({} if form.epsilon is None else {"norm_epsilon": form.epsilon})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def write_sizes(config: GatedDeltaConfig, form: DeltaForm) -> dict[str, Any]:
    """The keys of a `config.json`."""
    values = {setting.theirs: getattr(config, setting.ours) for setting in SETTINGS}
    return values | ({"linear_allow_neg_eigval": config.negative_eigenvalues} if form.has_sign else {})


def differences(config: GatedDeltaConfig, form: DeltaForm, epsilon: float) -> set[str]:
    """Settings that the type does not have; `epsilon` is that of other norms."""
    lacking = {
        "linear_attention.negative_eigenvalues": config.negative_eigenvalues and not form.has_sign,
        "linear_attention.weight_format": config.weight_format not in (None, form.name),
        "linear_attention.norm_epsilon": (config.norm_epsilon or epsilon) != (form.epsilon or epsilon),
    }
    return {name for name, differs in lacking.items() if differs}
