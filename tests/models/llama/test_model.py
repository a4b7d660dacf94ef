"""Llama: the residual stream inside a block."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.models.interface import Documents
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaBlock

SIZES = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3, "seq_len": 8}


def test_the_stream_of_a_bfloat16_block_is_rounded_only_at_its_end():
    """Attention and MLP add 0.003 each, less than half of bfloat16's step at 1, 0.0078, and together more."""
    block = LlamaBlock(LlamaConfig(**SIZES, use_bias=True, use_mlp_bias=True), "xla")
    x = jnp.ones((1, 4, 16), jnp.bfloat16)
    shapes = nn.meta.unbox(jax.eval_shape(lambda key: block.init(key, x, 0, True, Documents()), jax.random.key(0)))[
        "params"
    ]
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.bfloat16), shapes)
    for part, layer in (("attn", "out"), ("mlp", "down")):
        params[part][layer]["bias"] += 0.003
    out, _ = jax.jit(lambda p: block.apply({"params": p}, x, 0, True, Documents()))(params)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out.astype(np.float32), 1 + 2**-7)
