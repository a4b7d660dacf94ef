"""GPT-2 in the Hugging Face format.

Their Conv1D stores [in, out] as we do, so nothing is transposed; their attention matrix has columns q, k, v, each
head-major, which is ours flattened.
"""

from typing import Any

from lmtrain.hf.key_map import Row
from lmtrain.models.gpt2.config import Gpt2Config

_H = "transformer.h.{layer}."

TABLE = (
    Row("tokens/embedding", "transformer.wte.weight"),
    Row("positions/embedding", "transformer.wpe.weight"),
    Row("blocks/norm_attn/scale", _H + "ln_1.weight"),
    Row("blocks/norm_attn/bias", _H + "ln_1.bias"),
    Row("blocks/attn/qkv/kernel", _H + "attn.c_attn.weight", rows=1),
    Row("blocks/attn/qkv/bias", _H + "attn.c_attn.bias", rows=0),
    Row("blocks/attn/out/kernel", _H + "attn.c_proj.weight", rows=2),
    Row("blocks/attn/out/bias", _H + "attn.c_proj.bias"),
    Row("blocks/norm_mlp/scale", _H + "ln_2.weight"),
    Row("blocks/norm_mlp/bias", _H + "ln_2.bias"),
    Row("blocks/mlp/up/kernel", _H + "mlp.c_fc.weight"),
    Row("blocks/mlp/up/bias", _H + "mlp.c_fc.bias"),
    Row("blocks/mlp/down/kernel", _H + "mlp.c_proj.weight"),
    Row("blocks/mlp/down/bias", _H + "mlp.c_proj.bias"),
    Row("norm_final/scale", "transformer.ln_f.weight"),
    Row("norm_final/bias", "transformer.ln_f.bias"),
)


def table(config: Gpt2Config) -> tuple[Row, ...]:
    """The weights of a GPT-2 of any size."""
    return TABLE


def to_hf_config(config: Gpt2Config, vocab_size: int, eos_id: int | None, bos_id: int | None) -> dict[str, Any]:
    """The `config.json` of a GPT-2. Values have exactly the JSON types that transformers 5 insists on."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab_size,
        "n_positions": config.seq_len,
        "n_embd": config.hidden_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "activation_function": "gelu_new",
        "resid_pdrop": config.resid_pdrop,
        "embd_pdrop": config.embed_pdrop,
        "attn_pdrop": config.attn_pdrop,
        "layer_norm_epsilon": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "reorder_and_upcast_attn": config.upcast_attn,
        "tie_word_embeddings": True,
        "eos_token_id": eos_id,
        "bos_token_id": bos_id,
    }
