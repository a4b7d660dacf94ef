"""Linear, Embed and lookup of rows against numpy; gradients are float32 sums. Meshes: tests/sharding/test_matrix.py."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from lmtrain.models.layers.linear import Embed, Linear, add_bias, declare, look_up, sizes

E, H, C = ("embed", 6), ("heads", 2), ("head_dim", 3)


def init(module, x):
    boxed = module.init(jax.random.key(0), x)
    values = jax.tree.map(lambda p: np.random.default_rng(1).normal(size=p.shape).astype(np.float32), boxed)
    return nn.meta.unbox(values), nn.get_partition_spec(boxed)["params"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "leading"),
    [((E,), (H, C), (4, 5)), ((H, C), (E,), (4, 5)), ((E,), (E,), ()), ((E,), (("qkv", 3), H, C), (2,))],
)
def test_linear_is_x_w_plus_b_over_the_last_dimensions(inputs, outputs, leading):
    layer = Linear(inputs, outputs, normal(1.0))
    x = np.random.default_rng(0).normal(size=(*leading, *sizes(inputs))).astype(np.float32)
    variables, names = init(layer, x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    assert kernel.shape == sizes(inputs) + sizes(outputs)
    assert tuple(names["kernel"]) == tuple(name for name, _ in inputs + outputs)
    assert tuple(names["bias"]) == tuple(name for name, _ in outputs)
    expected = np.tensordot(x, kernel, axes=len(inputs)) + bias
    np.testing.assert_allclose(layer.apply(variables, x), expected, rtol=1e-5, atol=1e-5)


def test_linear_without_bias_has_no_bias_parameter():
    layer = Linear((E,), (E,), normal(1.0), use_bias=False)
    x = np.ones((2, 6), np.float32)
    variables, _ = init(layer, x)
    assert set(variables["params"]) == {"kernel"}
    np.testing.assert_allclose(layer.apply(variables, x), x @ variables["params"]["kernel"], rtol=1e-5, atol=1e-6)


def test_embed_gives_rows_bitwise():
    layer = Embed(("vocab", 9), 6, normal(1.0))
    ids = np.array([[0, 8, 3], [3, 3, 1]])
    variables, names = init(layer, ids)
    assert tuple(names["embedding"]) == ("vocab", "embed")
    np.testing.assert_array_equal(layer.apply(variables, ids), variables["params"]["embedding"][ids])


def test_an_unknown_axis_name_is_refused_when_declared():
    with pytest.raises(AssertionError, match="unknown logical axis 'width'"):
        declare(normal(1.0), (("width", 4),))


def test_the_gradient_of_a_bias_is_summed_in_float32_and_the_sum_stays_bfloat16():
    """Without automatic widening of the sum, as in XLA's unoptimized program."""
    y, bias = jax.ShapeDtypeStruct((4, 6, 2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    text = jax.jit(jax.grad(lambda b, y: (add_bias(y, b) * y).sum())).lower(bias, y).as_text()
    reduced = re.findall(r"stablehlo.reduce\(.*\(tensor<4x6x2x3x(\w+)>", text)
    assert reduced == ["f32"], text
    assert jax.eval_shape(add_bias, y, bias).dtype == jnp.bfloat16
    wide = np.random.default_rng(0).normal(size=(4, 6, 2, 3)).astype(np.float32)
    gradient = jax.grad(lambda b: (add_bias(wide, b) ** 2).sum())(np.ones((2, 3), np.float32))
    np.testing.assert_allclose(gradient, 2 * (wide + 1).sum((0, 1)), rtol=1e-5)


V, D = 50, 8
RNG = np.random.default_rng(0)


def relative(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


@pytest.fixture
def frequent():
    """Ids as in text, with a few very frequent ones; and gradients of positions with a common direction."""
    shares = 1 / np.arange(1, V + 1)
    ids = RNG.choice(V, (16, 1024), p=shares / shares.sum())
    return ids, jnp.asarray(RNG.normal(0.3, 1, (16, 1024, D)), jnp.bfloat16)


def test_rows_are_those_of_the_ids_and_unknown_ids_have_none():
    table = RNG.normal(size=(V, D)).astype(np.float32)
    ids = np.array([[3, 3, 49], [0, 7, V]])
    found = np.asarray(look_up(table, ids, "vocab"))
    np.testing.assert_array_equal(found[0], table[[3, 3, 49]])
    assert np.isnan(found[1, 2]).all()


def test_a_bfloat16_table_gets_a_gradient_that_was_summed_in_float32(frequent):
    ids, upstream = frequent
    table = jnp.asarray(RNG.normal(size=(V, D)), jnp.bfloat16)
    exact = np.zeros((V, D))
    np.add.at(exact, ids, np.asarray(upstream, np.float64))

    def pull_back(find):
        return jax.jit(lambda table: jax.vjp(find, table)[1](upstream)[0])(table)

    found = pull_back(lambda table: look_up(table, ids, "vocab"))
    assert found.dtype == jnp.bfloat16
    assert relative(found, exact) < 0.003
    # the plain sum in bfloat16 is not exact
    assert relative(pull_back(lambda table: jnp.take(table, ids, axis=0)), exact) > 0.03


def test_positions_are_added_and_get_a_gradient_that_was_summed_in_float32():
    upstream = jnp.asarray(RNG.normal(0.3, 1, (2000, 4, D)), jnp.bfloat16)
    table = jnp.asarray(RNG.normal(size=(6, D)), jnp.bfloat16)
    x = jnp.zeros(upstream.shape, jnp.bfloat16)
    positions = Embed(("position", 6), D, nn.initializers.zeros)

    def add(x, table):
        return positions.apply({"params": {"embedding": table}}, x, method="add_to")

    added, pull_back = jax.vjp(add, x, table)
    np.testing.assert_array_equal(added[7], table[:4])
    d_x, d_table = pull_back(upstream)
    np.testing.assert_array_equal(d_x, upstream)
    assert relative(d_table[:4], np.asarray(upstream, np.float64).sum(0)) < 0.003
    assert not d_table[4:].any()
