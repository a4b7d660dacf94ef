"""MLPs and activations against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal
from models import quick

from lmtrain.models.layers.mlp import ACTIVATIONS, Mlp

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
