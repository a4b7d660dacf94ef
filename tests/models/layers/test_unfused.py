"""Barriers around products: in programs for TPUs only, for gradients too, and without an effect on results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.interface import Documents
from lmtrain.models.layers import remat
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaBlock

CONFIG = LlamaConfig(hidden_dim=16, intermediate_dim=32, num_heads=2, num_layers=1, seq_len=8)


def gradients():
    """The compiled text of a block's gradients, before the compiler has optimised it, and the gradients."""
    block = LlamaBlock(CONFIG, "xla")
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    params = block.init(jax.random.key(0), x, jnp.int32(0), True, Documents())

    def loss(params, x):
        return (block.apply(params, x, jnp.int32(0), True, Documents())[0] ** 2).sum()

    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x)
    return traced.as_text(), traced.compile()(params, x)


def test_a_block_has_them_on_tpus_only_and_computes_the_same(monkeypatch):
    plain, expected = gradients()
    monkeypatch.setattr(remat, "platform", lambda: "tpu")
    text, found = gradients()
    assert plain.count("optimization_barrier") == 0
    # inputs and outputs of attention and MLP, the gradients of these four, the gradient of the MLP's input as tokens,
    # and that of its hidden units
    assert text.count("optimization_barrier") == 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)


@pytest.mark.parametrize("function", [remat.unfused, remat.unfused_gradient])
def test_second_derivatives_pass_through(monkeypatch, function):
    monkeypatch.setattr(remat, "platform", lambda: "tpu")
    slope = jax.grad(lambda x: function(x) ** 3)
    assert jax.jvp(slope, (2.0,), (1.0,))[1] == 12.0
