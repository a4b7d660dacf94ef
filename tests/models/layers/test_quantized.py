"""8-bit numbers and their products: types, scales, exactness, and values that are not finite."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.models.layers.quantized import FORMATS, product, quantize, stored_product

RNG = np.random.default_rng(0)
TYPES = {kind: kind for types in FORMATS.values() for kind in types}
NAMES = [str(kind) for kind in TYPES]
# Half of the distance between neighbours, relative to the number, or to the largest for integers.
ROUNDING = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0.5 / 127}


def numbers(*shape, dtype=np.float32):
    return jnp.asarray(RNG.normal(size=shape), dtype)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(("dtype", "largest"), [("float32", 1e-30), ("bfloat16", 1.0), ("float32", 3e38)])
def test_numbers_are_rounded_to_the_nearest_and_none_overflows(kind, dtype, largest):
    x = numbers(64, 32)
    x = (x / jnp.abs(x).max() * largest).astype(dtype)
    found = quantize(x, jnp.dtype(kind), (0, 1))
    assert found.values.dtype == kind
    assert found.scale.shape == (1, 1)
    exact, rounded = (
        np.asarray(x, np.float64),
        np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64),
    )
    assert np.isfinite(rounded).all()
    # floats keep a relative error down to their smallest normal number, 2^-14 or more of the largest
    size = np.full_like(exact, largest) if kind == "int8" else np.maximum(np.abs(exact), largest * 2**-13)
    assert (np.abs(rounded - exact) <= 1.01 * ROUNDING[kind] * size).all()
    np.testing.assert_allclose(found.numbers(jnp.float32), rounded, rtol=1e-6)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_scales_of_floats_are_powers_of_two(kind):
    """So that they round nothing: a tensor and the same times another power of two have the same bits."""
    x = numbers(16, 16)
    found, larger = quantize(x, jnp.dtype(kind), (0, 1)), quantize(x * 2**20, jnp.dtype(kind), (0, 1))
    assert np.log2(found.scale).item() % 1 == 0
    np.testing.assert_array_equal(found.values.view(jnp.uint8), larger.values.view(jnp.uint8))
    assert larger.scale == found.scale * 2**20


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("size", [0.0, 1e-6, 6e4])
def test_float16_numbers_do_not_overflow(kind, size):
    """A frozen base may have them; the inverse of a scale may be larger than they can be."""
    x = jnp.full((8, 8), size, jnp.float16)
    assert np.isfinite(1 / quantize(x, jnp.dtype(kind), (0, 1)).scale).all()
    np.testing.assert_allclose(quantize(x, jnp.dtype(kind), (0, 1)).numbers(jnp.float32), x, rtol=0.13)


PRIME = 2**18 + 3


@pytest.mark.parametrize(
    ("leading", "inputs", "outputs"), [((2, PRIME), 2, 3), ((133_144,), 2, 3), ((2, 3), PRIME, 2), ((5,), 2, PRIME)]
)
def test_int32_sums_do_not_overflow(leading, inputs, outputs):
    """Ones are the largest integers, 127: int32 adds 133,144 products of them."""
    ones = jnp.ones((*leading, inputs)), jnp.ones((inputs, outputs)), jnp.ones((*leading, outputs))
    y, d_x, d_kernel = jax.jit(lambda *arrays: with_gradients("int8", *arrays))(*ones)
    for found, terms in ((y, inputs), (d_x, outputs), (d_kernel, math.prod(leading))):
        np.testing.assert_allclose(found, terms, rtol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_stored_kernel_is_not_kept_in_more_bits_for_the_gradient(name):
    x, kernel, d_y = numbers(2, 3, 16), numbers(16, 2, 4), numbers(2, 3, 2, 4)
    stored = quantize(kernel, FORMATS[name].values, (0, 1, 2))
    y, pull = jax.vjp(lambda x: stored_product(x, stored, 1), x)
    exact = np.asarray(stored.numbers(jnp.float32))
    np.testing.assert_allclose(y, np.tensordot(x, exact, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull(d_y)[0], np.tensordot(d_y, exact, ((2, 3), (1, 2))), rtol=1e-5, atol=1e-5)
    kept = {str(leaf.dtype) for leaf in jax.tree.leaves(pull) if leaf.size == kernel.size}
    assert kept == {str(FORMATS[name].values)}


def with_gradients(name, x, kernel, d_y, inputs=1):
    """A product and its gradients with an 8-bit copy of the kernel."""
    copy = quantize(kernel, FORMATS[name].values, tuple(range(kernel.ndim)))
    y, pull = jax.vjp(lambda x, kernel: product(x, kernel, copy, inputs), x, kernel)
    return y, *pull(d_y)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("value", "where"), [(np.nan, "x"), (np.inf, "x"), (np.inf, "kernel"), (np.nan, "d_y")])
def test_a_value_that_is_not_finite_is_not_hidden(name, value, where):
    """A loss or a gradient norm that is not finite stops a run before it saves."""
    arrays = {"x": numbers(8, 16), "kernel": numbers(16, 4), "d_y": numbers(8, 4)}
    arrays[where] = arrays[where].at[2, 3].set(value)
    y, d_x, d_kernel = with_gradients(name, **arrays)
    affected = {"x": (y, d_kernel), "kernel": (y, d_x), "d_y": (d_x, d_kernel)}[where]
    for result in affected:
        assert not np.isfinite(np.asarray(result)).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("leading", "inputs", "outputs"), [((6,), (16,), (2, 4)), ((2, 3), (2, 8), (8,))])
def test_products_are_those_of_the_rounded_numbers_in_float64(name, leading, inputs, outputs):
    x, kernel, d_y = numbers(*leading, *inputs), numbers(*inputs, *outputs), numbers(*leading, *outputs)
    y, d_x, d_kernel = with_gradients(name, x, kernel, d_y, len(inputs))

    def rounded(array, kind):
        found = quantize(array, kind, tuple(range(array.ndim)))
        return np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64)

    x8, kernel8 = (rounded(array, FORMATS[name].values) for array in (x, kernel))
    d8 = rounded(d_y, FORMATS[name].gradients)
    n, i, o = len(leading), len(inputs), len(outputs)
    expected = {
        "y": (y, np.tensordot(x8, kernel8, i)),
        "d_x": (d_x, np.tensordot(d8, kernel8, (tuple(range(n, n + o)), tuple(range(i, i + o))))),
        "d_kernel": (d_kernel, np.tensordot(x8, d8, (tuple(range(n)), tuple(range(n))))),
    }
    for what, (found, value) in expected.items():
        assert found.shape == value.shape
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=what)


@pytest.mark.parametrize("name", FORMATS)
def test_all_three_products_have_operands_of_8_bits(name):
    arguments = (
        numbers(8, 16, dtype=jnp.bfloat16),
        numbers(16, 4, dtype=jnp.bfloat16),
        numbers(8, 4, dtype=jnp.bfloat16),
    )
    values, gradients = (str(kind) for kind in FORMATS[name])
    found = quick.operands(lambda *arrays: with_gradients(name, *arrays), *arguments)
    assert sorted(found) == sorted([(values, values), (gradients, values), (values, gradients)])
    for result, like in zip(with_gradients(name, *arguments), (arguments[2], *arguments[:2]), strict=True):
        assert (result.shape, result.dtype) == (like.shape, like.dtype)
