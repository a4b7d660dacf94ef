"""Layer norm against plain numpy in float64."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.norm import LayerNorm


def layer_norm(x, scale, bias, epsilon):
    x = np.asarray(x, np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * scale + bias


def case(dim=16, seed=0):
    random = np.random.default_rng(seed)
    draw = [random.normal(size=shape).astype(np.float32) for shape in ((3, 4, dim), (dim,), (dim,))]
    return draw[0], {"scale": draw[1], "bias": draw[2]}


@pytest.mark.parametrize("epsilon", [1e-5, 1e-2, 1.0])
def test_formula_with_epsilon_inside_the_root(epsilon):
    x, params = case()
    y = LayerNorm(16, epsilon).apply({"params": params}, x)
    np.testing.assert_allclose(y, layer_norm(x, **params, epsilon=epsilon), rtol=1e-5, atol=1e-5)


def test_a_large_common_offset_does_not_spoil_the_variance():
    x, params = case()
    x = x + np.float32(1000)
    y = LayerNorm(16, 1e-5).apply({"params": params}, x)
    np.testing.assert_allclose(y, layer_norm(x, **params, epsilon=1e-5), atol=5e-3)


def test_constant_input_gives_the_bias_and_a_finite_gradient():
    _, params = case()
    norm = LayerNorm(16, 1e-5)
    x = jnp.full((2, 16), 3.0)
    assert np.array_equal(norm.apply({"params": params}, x), np.broadcast_to(params["bias"], (2, 16)))
    assert np.isfinite(jax.grad(lambda x: norm.apply({"params": params}, x).sum())(x)).all()


def test_statistics_are_float32_when_the_stream_is_bfloat16():
    x, params = case(dim=512)
    x = jnp.asarray(x + 4, jnp.bfloat16)
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), params)
    y = LayerNorm(512, 1e-5).apply({"params": half}, x)
    wide = {name: np.asarray(p, np.float64) for name, p in half.items()}
    exact = layer_norm(x, **wide, epsilon=1e-5)
    assert y.dtype == jnp.bfloat16
    # only the final rounding to 8 bits of mantissa is left
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-4)


def test_a_fresh_norm_has_scale_one_bias_zero_and_the_embed_axis():
    boxed = LayerNorm(16, 1e-5).init(jax.random.key(0), jnp.ones((1, 16)))["params"]
    assert boxed["scale"].names == boxed["bias"].names == ("embed",)
    params = nn.meta.unbox(boxed)
    assert np.array_equal(params["scale"], np.ones(16, np.float32))
    assert np.array_equal(params["bias"], np.zeros(16, np.float32))
