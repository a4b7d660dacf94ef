"""GPT-2 in the Hugging Face format.

The Conv1D of transformers stores [in, out] as lmtrain does, so nothing is transposed; its attention matrix has columns
q, k, v, each head-major, which is ours flattened.
"""

from collections.abc import Mapping
from typing import Any

from lmtrain.hf.key_map import Row, Table, Zeros
from lmtrain.models.base_config import SameSetting, from_hf, to_hf
from lmtrain.models.gpt2.config import Gpt2Config, Gpt2Settings
from lmtrain.runtime.errors import UserError

DEFAULT_REF = "gpt2"
MODEL_TYPES = ("gpt2",)
HAS_LEARNED_POSITIONS = True
ALWAYS_HAS_BIASES = True
PUBLISHED_DTYPE = "float32"


def trunk(config: Gpt2Settings, prefix: str) -> list[Row | Zeros]:
    """Rows for embeddings, blocks and final norm; their biases are zeros if ours has none."""
    dim, block = config.hidden_dim, prefix + "h.{layer}."
    return [
        Row("tokens/embedding", prefix + "wte.weight", vocab=True),
        Row("positions/embedding", prefix + "wpe.weight", cut=True),
        Row("norm_final/scale", prefix + "ln_f.weight"),
        *bias(config, "norm_final", prefix + "ln_f", dim),
        Row("blocks/norm_attn/scale", block + "ln_1.weight"),
        *bias(config, "blocks/norm_attn", block + "ln_1", dim),
        Row("blocks/attn/qkv/kernel", block + "attn.c_attn.weight", rows=1),
        *bias(config, "blocks/attn/qkv", block + "attn.c_attn", 3 * dim, flat=True),
        Row("blocks/attn/out/kernel", block + "attn.c_proj.weight", rows=2),
        *bias(config, "blocks/attn/out", block + "attn.c_proj", dim),
        Row("blocks/norm_mlp/scale", block + "ln_2.weight"),
        *bias(config, "blocks/norm_mlp", block + "ln_2", dim),
        Row("blocks/mlp/up/kernel", block + "mlp.c_fc.weight"),
        *bias(config, "blocks/mlp/up", block + "mlp.c_fc", config.mlp_dim),
        Row("blocks/mlp/down/kernel", block + "mlp.c_proj.weight"),
        *bias(config, "blocks/mlp/down", block + "mlp.c_proj", dim),
    ]


def reads(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this family."""
    return values.get("model_type") in MODEL_TYPES and "num_senses" not in values  # a Backpack has num_senses


def bias(config: Gpt2Settings, ours: str, theirs: str, size: int, flat: bool = False) -> list[Row | Zeros]:
    """The row of a bias, zeros if ours has none; `flat` if ours has more than one dimension."""
    name = theirs + ".bias"
    if config.use_bias:
        return [Row(ours + "/bias", name, rows=0 if flat else None)]
    return [Zeros(name, (size,), is_stacked="{layer}" in name)]


def table(config: Gpt2Config) -> Table:
    """The table of weights of this config."""
    untied = [] if config.tie_word_embeddings else [Row("unembed/embedding", "lm_head.weight", vocab=True)]
    return [*trunk(config, "transformer."), *untied]


def canonical(name: str, config: Gpt2Config) -> str | None:
    """A tensor's name as in `table`; None for other tensors. The first files on the hub have no prefix."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None  # causal masks
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def exported(name: str, config: Gpt2Config) -> str:
    """A tensor's name in exports: that of OpenAI's files, which mlx-lm requires. Next to a head transformers needs the
    prefix."""
    return name.removeprefix("transformer.") if config.tie_word_embeddings else name


def to_hf_config(config: Gpt2Config, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The `config.json` of a GPT-2. Values have exactly the JSON types that transformers 5 requires."""
    # transformers 4 silently ignores these two settings with torch's attention function
    is_special = config.scale_attn_by_inverse_layer_idx or config.upcast_attn
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "tie_word_embeddings": config.tie_word_embeddings,
        **trunk_to_hf(config, vocab_size, eos_id, bos_id),
        **({"_attn_implementation": "eager"} if is_special else {}),
    }


def trunk_to_hf(config: Gpt2Settings, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The part of `config.json` that GPT-2 and families built on it share."""
    return {
        "vocab_size": vocab_size,
        **to_hf(_SETTINGS, config),
        "n_ctx": config.seq_len,  # transformers has forgotten it, other programs have not
        "n_inner": config.mlp_dim,
        "scale_attn_weights": True,
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
    }


def from_hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes. Raises `UserError` for unsupported ones."""
    return {
        "type": "gpt2",
        **trunk_from_hf(values),
        "tie_word_embeddings": values.get("tie_word_embeddings", True),
    }


_SETTINGS = [
    SameSetting("seq_len", "n_positions", 1024),
    SameSetting("hidden_dim", "n_embd", 768),
    SameSetting("num_layers", "n_layer", 12),
    SameSetting("num_heads", "n_head", 12),
    SameSetting("activation_function", "activation_function", "gelu_new"),
    SameSetting("resid_pdrop", "resid_pdrop", 0.1),
    SameSetting("embed_pdrop", "embd_pdrop", 0.1),
    SameSetting("attn_pdrop", "attn_pdrop", 0.1),
    SameSetting("layer_norm_epsilon", "layer_norm_epsilon", 1e-5),
    SameSetting("initializer_range", "initializer_range", 0.02),
    SameSetting("scale_attn_by_inverse_layer_idx", "scale_attn_by_inverse_layer_idx", False),
    SameSetting("upcast_attn", "reorder_and_upcast_attn", False),
]
# Aliases of the same functions.
_SAME = {"gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new", "swish": "silu"}


def trunk_from_hf(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the trunk."""
    if not values.get("scale_attn_weights", True):
        raise UserError("config.json: scale_attn_weights false (attention without scaling) is not supported")
    dim, inner = values.get("n_embd", 768), values.get("n_inner")
    width = {"mlp_scale": inner // dim} if inner and inner % dim == 0 else {"intermediate_dim": inner}
    settings = from_hf(_SETTINGS, values) | (width if inner else {})
    activation = str(settings["activation_function"])
    return settings | {"activation_function": _SAME.get(activation, activation)}
