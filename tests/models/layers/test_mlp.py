"""MLPs, activations and norms against their formulas."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal
from models import quick

from lmtrain.models.layers.mlp import ACTIVATIONS, LayerNorm, Mlp, RmsNorm

X = np.linspace(-3, 3, 13).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: x * (1 + math.erf(x / 2**0.5)) / 2),
        ("gelu_new", lambda x: x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2),
    ],
)
def test_activations_have_their_formulas(name, formula):
    np.testing.assert_allclose(ACTIVATIONS[name](X), [formula(float(x)) for x in X], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_an_mlp_is_two_products_around_the_activation_or_three_with_a_gate(gated):
    outputs = (("senses", 3), ("embed", 2))
    mlp = Mlp(4, 6, "relu", normal(1.0), normal(1.0), True, is_gated=gated, outputs=outputs)
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    shapes = jax.eval_shape(mlp.init, jax.random.key(0), x)
    params = quick.random_like(shapes)
    layers = {name: (layer["kernel"], layer["bias"]) for name, layer in params.items()}
    up = x @ layers["up"][0] + layers["up"][1]
    hidden = np.maximum(x @ layers["gate"][0] + layers["gate"][1], 0) * up if gated else np.maximum(up, 0)
    kernel, bias = layers["down"]
    expected = np.einsum("bsf,fed->bsed", hidden, kernel) + bias
    np.testing.assert_allclose(jax.jit(mlp.apply)({"params": params}, jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


SCALE = np.linspace(0.5, 2.0, 8).astype(np.float32)
BIAS = np.linspace(-1.0, 1.0, 8).astype(np.float32)


def normalised(x: np.ndarray, epsilon: float) -> np.ndarray:
    x = x.astype(np.float64)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * SCALE + BIAS


def apply(x, epsilon: float = 1e-5):
    return LayerNorm(8, epsilon).apply({"params": {"scale": SCALE, "bias": BIAS}}, jnp.asarray(x))


@pytest.mark.parametrize("epsilon", [1e-5, 0.5])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_it_is_the_formula_over_the_last_dimension(epsilon, offset):
    x = (np.random.default_rng(0).normal(size=(2, 3, 8)) + offset).astype(np.float32)
    np.testing.assert_allclose(apply(x, epsilon), normalised(x, epsilon), rtol=1e-4, atol=1e-4)


def test_a_constant_row_gives_the_bias():
    np.testing.assert_array_equal(apply(np.full((1, 8), 4.0, np.float32))[0], BIAS)


def test_statistics_of_bfloat16_are_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)) * 3 + 20, jnp.bfloat16)
    out = apply(x)
    assert out.dtype == jnp.bfloat16
    exact = jnp.asarray(normalised(np.asarray(x, np.float32), 1e-5), jnp.float32)
    # only the last rounding may differ from the exact result
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("dims", [(("embed", 6),), (("heads", 2), ("head_dim", 3))])
def test_rms_norm_is_its_formula_over_all_its_dimensions(dims, offset):
    layer = RmsNorm(dims, 0.1, offset)
    x = np.random.default_rng(0).normal(size=(4, 2, 3) if len(dims) == 2 else (4, 6)).astype(np.float32)
    scale = np.random.default_rng(1).normal(size=x.shape[1:]).astype(np.float32)
    flat = x.reshape(4, 6)
    expected = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 0.1) * (scale.reshape(6) + offset)
    found = layer.apply({"params": {"scale": scale}}, x)
    np.testing.assert_allclose(np.asarray(found).reshape(4, 6), expected, rtol=1e-5)
    fresh = nn.meta.unbox(layer.init(jax.random.key(0), x))["params"]["scale"]
    assert set(np.unique(fresh)) == {0.0 if offset else 1.0}
    assert layer.apply({"params": {"scale": scale}}, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
