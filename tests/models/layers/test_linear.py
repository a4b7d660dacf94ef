"""Linear and Embed against plain numpy; their parameters' names."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn.initializers import normal

from lmtrain.models.layers.linear import Embed, Linear, add_bias, declare, sizes

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
