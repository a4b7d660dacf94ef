"""The linear layer and the embedding table against plain numpy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.linear import Embed, Linear, declare

NORMAL = nn.initializers.normal(0.02)
D, QKV, H, C = ("embed", 6), ("qkv", 3), ("heads", 2), ("head_dim", 5)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("inputs", "outputs", "formula"),
    [
        ((D,), (("mlp", 7),), "bsd,df->bsf"),
        ((D,), (QKV, H, C), "bsd,dqhc->bsqhc"),
        ((H, C), (D,), "bshc,hcd->bsd"),
        ((H, C), (QKV, H), "bshc,hcqg->bsqg"),
    ],
)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_is_x_w_plus_b_over_all_named_dimensions(inputs, outputs, formula, use_bias):
    in_sizes, out_sizes = [n for _, n in inputs], [n for _, n in outputs]
    x, kernel, bias = normal(0, 4, 3, *in_sizes), normal(1, *in_sizes, *out_sizes), normal(2, *out_sizes)
    params = {"kernel": kernel, "bias": bias} if use_bias else {"kernel": kernel}
    y = Linear(inputs, outputs, NORMAL, use_bias).apply({"params": params}, x)
    expected = np.einsum(formula, x, kernel) + (bias if use_bias else 0)
    assert y.shape == (4, 3, *out_sizes)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3, 4), (0, 3)])
def test_linear_keeps_any_leading_dimensions(leading):
    x, kernel, bias = normal(0, *leading, 6), normal(1, 6, 7), normal(2, 7)
    y = Linear((D,), (("mlp", 7),), NORMAL).apply({"params": {"kernel": kernel, "bias": bias}}, x)
    assert y.shape == (*leading, 7)
    np.testing.assert_allclose(y, x @ kernel + bias, rtol=1e-5, atol=1e-5)


def test_linear_refuses_an_input_of_another_width():
    kernel, bias = normal(1, 6, 7), normal(2, 7)
    with pytest.raises(TypeError, match="reshape"):
        Linear((D,), (("mlp", 7),), NORMAL).apply({"params": {"kernel": kernel, "bias": bias}}, normal(0, 2, 5))


def test_linear_initialises_the_kernel_by_its_law_and_the_bias_with_zeros():
    boxed = Linear((("embed", 200),), (("mlp", 300),), nn.initializers.normal(0.3)).init(
        jax.random.key(0), jnp.ones((1, 200))
    )["params"]
    params = nn.meta.unbox(boxed)
    assert params["kernel"].shape == (200, 300)
    assert float(params["kernel"].std()) == pytest.approx(0.3, rel=0.03)
    assert abs(float(params["kernel"].mean())) < 0.01
    assert np.array_equal(params["bias"], np.zeros(300, np.float32))


def test_parameters_carry_one_name_per_dimension():
    boxed = jax.eval_shape(Linear((D,), (QKV, H, C), NORMAL).init, jax.random.key(0), jnp.ones((1, 6)))["params"]
    assert boxed["kernel"].names == ("embed", "qkv", "heads", "head_dim")
    assert boxed["bias"].names == ("qkv", "heads", "head_dim")
    boxed = jax.eval_shape(Embed(("vocab", 9), 6, NORMAL).init, jax.random.key(0), jnp.zeros(1, jnp.int32))["params"]
    assert boxed["embedding"].names == ("vocab", "embed")


@pytest.mark.parametrize("axis", ["widht", "act_embed", ""])
def test_a_word_outside_the_vocabulary_is_refused(axis):
    with pytest.raises(AssertionError, match="unknown logical axis"):
        declare(NORMAL, (("embed", 6), (axis, 7)))


def test_linear_computes_in_the_precision_of_its_parameters():
    params = {"kernel": jnp.ones((6, 7), jnp.bfloat16), "bias": jnp.ones(7, jnp.bfloat16)}
    y = Linear((D,), (("mlp", 7),), NORMAL).apply({"params": params}, jnp.ones((2, 6), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y.astype(np.float32), np.full((2, 7), 7.0, np.float32))


@pytest.mark.parametrize("ids", [[[3, 0, 8], [8, 8, 1]], [4], 2])
def test_embed_gives_exactly_the_rows_of_the_ids(ids):
    table = normal(0, 9, 6)
    rows = Embed(("vocab", 9), 6, NORMAL).apply({"params": {"embedding": table}}, jnp.asarray(ids))
    assert np.array_equal(rows, table[np.asarray(ids)])
