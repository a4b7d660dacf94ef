"""Every kernel of grouped products is the loop over experts, and each platform gets a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.quantized import FORMATS, dequantize, quantize
from lmtrain.models.moe import grouped
from lmtrain.models.moe.grouped import choose_grouped, kernel_of

# Rows of each expert, rows, inputs, outputs.
SHAPES = {
    "empty experts": ([0, 30, 0, 17, 33, 0], 80, 24, 40),
    "rows after the last expert": ([20, 0, 31], 96, 16, 24),
    "all rows of one": ([0, 64, 0], 64, 16, 16),
    "no rows": ([0, 0], 20, 16, 16),
}
KERNELS = ["tiled", "megablox"]


def both(name, x, kernel, d_y, sizes):
    """The product and the gradients of its arguments."""

    @jax.jit
    def run(x, kernel, d_y):
        y, pull = jax.vjp(lambda x, kernel: grouped.product(name, x, kernel, jnp.array(sizes, jnp.int32)), x, kernel)
        return y, *pull(d_y)

    return run(x, kernel, d_y)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_a_loop_over_experts(name, shape):
    sizes, rows, inputs, outputs = SHAPES[shape]
    rng = np.random.default_rng(0)
    x, kernel, d_y = (
        rng.normal(size=size).astype(np.float32)
        for size in ((rows, inputs), (len(sizes), inputs, outputs), (rows, outputs))
    )
    total = sum(sizes)
    x[total:], d_y[total:] = np.nan, np.nan
    y, d_x, d_kernel = both(name, x, kernel, d_y, sizes)
    ends = np.cumsum(sizes)
    assert not np.any(y[total:])
    assert not np.any(d_x[total:])
    for expert, (begin, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        np.testing.assert_allclose(y[begin:end], x[begin:end] @ kernel[expert], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_x[begin:end], d_y[begin:end] @ kernel[expert].T, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_kernel[expert], x[begin:end].T @ d_y[begin:end], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "products"), [("tiled", "fp8"), ("tiled", "int8"), ("triton", "fp8")])
def test_products_in_8_bits_are_those_of_the_rounded_numbers(name, products):
    assert products in kernel_of(name).formats
    sizes, rows, inputs, outputs = SHAPES["empty experts"]
    rng = np.random.default_rng(0)
    x, kernel, d_y = (
        rng.normal(size=size).astype(np.float32)
        for size in ((rows, inputs), (len(sizes), inputs, outputs), (rows, outputs))
    )
    kind = FORMATS[products].values
    copy = quantize(jnp.asarray(kernel), kind, (0, 1, 2))

    @jax.jit
    def run(x, kernel, d_y):
        sizes_E = jnp.array(sizes, jnp.int32)
        y, pull = jax.vjp(lambda x, kernel: grouped.product_8_bit(name, x, kernel, sizes_E, copy), x, kernel)
        return y, *pull(d_y)

    rounded = [
        np.asarray(dequantize(quantize(jnp.asarray(array), kind, tuple(range(array.ndim))), jnp.float32))
        for array in (x, kernel, d_y)
    ]
    for found, expected in zip(run(x, kernel, d_y), both("tiled", *rounded, sizes), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("platform", "name"), [("cpu", "tiled"), ("gpu", "triton"), ("tpu", "megablox")])
def test_each_platform_has_its_kernel(platform, name):
    assert choose_grouped(platform) == (name, "fastest on this device")


def test_without_the_triton_backend_the_next_kernel_is_used_with_the_reason(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    name, reason = choose_grouped("gpu")
    assert name == "tiled"
    assert "triton requires the Triton backend of Pallas" in reason


@pytest.mark.parametrize("name", ["tiled", "triton", "megablox"])
@pytest.mark.parametrize(("rows", "experts", "most"), [(16_384, 8, 1.13), (65_536, 128, 1.26)])
def test_tiles_add_few_rows(name, rows, experts, most):
    """Mixtral's and Qwen3-30B-A3B's rows of 8,192 tokens."""
    assert rows < kernel_of(name).rows_computed(rows, experts) <= most * rows


def test_the_products_of_a_program_are_named(monkeypatch):
    arguments = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([2, 2])
    assert grouped.SCOPE in jax.jit(grouped.grouped).lower(*arguments).as_text(debug_info=True)
