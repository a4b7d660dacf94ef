"""Backpack in the Hugging Face format, with our own modeling file, since transformers has none.

The trunk is that of GPT-2, with matrices [in, out]; only the projection for sense weights is stored [out, in].
"""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from lmtrain.hf.key_map import Row, Table
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.base_config import SameSetting, from_hf, to_hf
from lmtrain.models.gpt2.hf import bias, trunk, trunk_from_hf, trunk_to_hf

DEFAULT_REF = "stanfordnlp/backpack-gpt2"
MODEL_TYPES = ("backpack-gpt2",)
HAS_LEARNED_POSITIONS = True
ALWAYS_HAS_BIASES = True
PUBLISHED_DTYPE = "float32"

_MODELING = "modeling_backpack.py"
_S = "backpack.sense_network."
_SETTINGS = [
    SameSetting("num_senses", "num_senses", 16),
    SameSetting("sense_intermediate_scale", "sense_intermediate_scale", 4),
    SameSetting("divide_by_num_senses", "divide_by_num_senses", False),
]
_WEIGH = "backpack.sense_weight_net.c_attn"


def reads(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this family; the first ones on the hub have model_type gpt2."""
    return "num_senses" in values or values.get("model_type") in MODEL_TYPES


def table(config: BackpackConfig) -> Table:
    """The table of weights of this config."""
    dim, inner = config.hidden_dim, config.hidden_dim * config.sense_intermediate_scale
    return [
        *trunk(config, "backpack.gpt2_model."),
        Row("senses/norm_input/scale", _S + "ln.weight"),
        Row("senses/norm_mlp/scale", _S + "block.ln_1.weight"),
        Row("senses/norm_output/scale", _S + "block.ln_2.weight"),
        Row("senses/mlp/up/kernel", _S + "block.mlp.c_fc.weight"),
        Row("senses/mlp/down/kernel", _S + "block.mlp.c_proj.weight"),
        Row("senses/to_senses/up/kernel", _S + "final_mlp.c_fc.weight"),
        Row("senses/to_senses/down/kernel", _S + "final_mlp.c_proj.weight", rows=1),
        Row("weigh/kernel", _WEIGH + ".weight", rows=1, transpose=True),
        *bias(config, "senses/norm_input", _S + "ln", dim),
        *bias(config, "senses/norm_mlp", _S + "block.ln_1", dim),
        *bias(config, "senses/norm_output", _S + "block.ln_2", dim),
        *bias(config, "senses/mlp/up", _S + "block.mlp.c_fc", config.mlp_dim),
        *bias(config, "senses/mlp/down", _S + "block.mlp.c_proj", dim),
        *bias(config, "senses/to_senses/up", _S + "final_mlp.c_fc", inner),
        *bias(config, "senses/to_senses/down", _S + "final_mlp.c_proj", config.num_senses * dim, flat=True),
        *bias(config, "weigh", _WEIGH, 2 * dim, flat=True),
    ]


def canonical(name: str, config: BackpackConfig) -> str | None:
    """A tensor's name as in `table`; None for masks, and for duplicate names of the embeddings in published files."""
    if name.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return None if name.startswith(("backpack.word_embeddings.", "backpack.position_embeddings.")) else name


def extra_files() -> dict[str, bytes]:
    """The modeling file, which transformers runs with `trust_remote_code=True`."""
    return {_MODELING: files("lmtrain.models.backpack").joinpath("hub", _MODELING).read_bytes()}


def to_hf_config(config: BackpackConfig, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The `config.json`, which points at the modeling file."""
    return {
        "model_type": "backpack-gpt2",
        "architectures": ["BackpackLMHeadModel"],
        "auto_map": {
            "AutoConfig": "modeling_backpack.BackpackConfig",
            "AutoModelForCausalLM": "modeling_backpack.BackpackLMHeadModel",
        },
        **trunk_to_hf(config, vocab_size, eos_id, bos_id),
        **to_hf(_SETTINGS, config),
        "tie_word_embeddings": True,
    }


def from_hf_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model that a `config.json` describes. The published code does not divide by the senses."""
    published = {"n_positions": 512, "scale_attn_by_inverse_layer_idx": True}
    return {
        "type": "backpack",
        **trunk_from_hf(published | dict(values)),
        **from_hf(_SETTINGS, values),
    }
