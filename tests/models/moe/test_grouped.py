"""Every kernel of grouped products is the loop over experts. That for NVIDIA GPUs, compiled: tests/compiled/."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.attention.kernel import missing_tokamax
from lmtrain.models.layers.quantized import FORMATS, quantize
from lmtrain.models.moe import grouped, triton_kernels
from lmtrain.models.moe.grouped import choose_grouped, kernel_of
from lmtrain.models.moe.triton import rows_computed
from lmtrain.models.moe.triton_kernels import items_of

# Rows of each expert, rows, inputs, outputs.
SHAPES = {
    "empty experts": ([0, 30, 0, 17, 33, 0], 80, 24, 40),
    "rows after the last expert": ([20, 0, 31], 96, 16, 24),
    "all rows of one": ([0, 64, 0], 64, 16, 16),
    "no rows": ([0, 0], 20, 16, 16),
}
TRITON = {
    "empty groups": ([0, 30, 0, 0, 17, 33, 0], 80, 48, 40),
    "rows after the last group": ([20, 0, 31], 96, 33, 24),
    "no rows": ([0, 0], 20, 16, 16),
    "tiles of 128, columns": ([130, 300], 437, 140, 300),
}
LONG = {
    "one full group": ([0, 0, 64, 0], 64, 64, 64),
    "fewer rows than a tile": ([2, 0, 1], 5, 16, 16),
    "exact tiles": ([16, 32, 0, 16], 64, 128, 16),
    "tiles of 64": ([100, 150, 131], 384, 72, 130),
    "tiles of 32": ([1, 100, 64, 63], 256, 7, 260),
    "one group": ([300], 300, 20, 9),
}
NEEDS_TOKAMAX = pytest.mark.skipif(bool(missing_tokamax()), reason="needs Python 3.12: tools/check_matrix.sh")
CASES = [
    *(pytest.param(name, *case, id=f"{name}, {of}") for name in ("tiled", "megablox") for of, case in SHAPES.items()),
    *(pytest.param("tokamax", *case, id=f"tokamax, {of}", marks=NEEDS_TOKAMAX) for of, case in SHAPES.items()),
    *(pytest.param("triton", *case, id=f"triton, {of}") for of, case in TRITON.items()),
    *(pytest.param("triton", *case, id=f"triton, {of}", marks=pytest.mark.long) for of, case in LONG.items()),
]


def both(name, x, kernel, d_y, sizes):
    """The product and the gradients of its arguments."""

    @jax.jit
    def run(x, kernel, d_y):
        y, pull = jax.vjp(lambda x, kernel: grouped.product(name, x, kernel, jnp.array(sizes, jnp.int32)), x, kernel)
        return y, *pull(d_y)

    return run(x, kernel, d_y)


def expected(x, kernel, d_y, sizes):
    """The same, group by group."""
    y, d_x, d_kernel = np.zeros_like(d_y), np.zeros_like(x), np.zeros_like(kernel)
    ends = np.cumsum(sizes)
    for e, rows in enumerate(slice(end - size, end) for end, size in zip(ends, sizes, strict=True)):
        y[rows], d_x[rows], d_kernel[e] = x[rows] @ kernel[e], d_y[rows] @ kernel[e].T, x[rows].T @ d_y[rows]
    return y, d_x, d_kernel


def arrays(sizes, rows, inputs, outputs, dtype=np.float32):
    """Rows, matrices, and the gradient of the result; rows after the last group's are NaN."""
    rng = np.random.default_rng(rows)
    x, kernel, d_y = (
        rng.normal(size=shape).astype(dtype)
        for shape in ((rows, inputs), (len(sizes), inputs, outputs), (rows, outputs))
    )
    x[sum(sizes) :] = d_y[sum(sizes) :] = np.nan
    return x, kernel, d_y


@pytest.mark.parametrize(("name", "sizes", "rows", "inputs", "outputs"), CASES)
def test_products_and_gradients_are_those_of_a_loop_over_experts(name, sizes, rows, inputs, outputs):
    """Partial tiles of rows and columns, groups without rows, rows without a group."""
    given = arrays(sizes, rows, inputs, outputs)
    results, error = both(name, *given, sizes), 1e-4 if name == "triton" else 1e-5
    for what, computed, plain in zip(("y", "d_x", "d_kernel"), results, expected(*given, sizes), strict=True):
        np.testing.assert_allclose(computed, plain, rtol=error, atol=error, err_msg=what)
    assert not any(np.asarray(by_row)[sum(sizes) :].any() for by_row in results[:2])


@pytest.mark.parametrize(("name", "products"), [("tiled", "fp8"), ("tiled", "int8"), ("triton", "fp8")])
def test_products_in_8_bits_are_those_of_the_rounded_numbers(name, products):
    assert products in kernel_of(name).formats
    sizes, *shape = SHAPES["empty experts"]
    x, kernel, d_y = arrays(sizes, *shape)
    x, d_y = np.nan_to_num(x), np.nan_to_num(d_y)
    kind = FORMATS[products].values
    copy = quantize(jnp.asarray(kernel), kind, (0, 1, 2))

    @jax.jit
    def run(x, kernel, d_y):
        sizes_E = jnp.array(sizes, jnp.int32)
        y, pull = jax.vjp(lambda x, kernel: grouped.product_8_bit(name, x, kernel, sizes_E, copy), x, kernel)
        return y, *pull(d_y)

    rounded = [
        np.asarray(quantize(jnp.asarray(array), kind, tuple(range(array.ndim))).numbers(jnp.float32))
        for array in (x, kernel, d_y)
    ]
    for found, expected in zip(run(x, kernel, d_y), both("tiled", *rounded, sizes), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_sums_are_float32():
    """In 16 bits only results are rounded."""
    sizes = [33, 0, 60]
    given = arrays(sizes, 100, 150, 48, jnp.bfloat16)
    exact = expected(*(a.astype(np.float32) for a in given), sizes)
    for computed, plain in zip(both("triton", *given, sizes), exact, strict=True):
        assert computed.dtype == jnp.bfloat16
        np.testing.assert_allclose(computed.astype(np.float32), plain, rtol=2**-8, atol=1e-4)


def test_items_cover_all_rows_once():
    """Whatever the sizes; items have rows of one group."""
    rng = np.random.default_rng(0)
    for tile in (16, 64):
        for sizes in (
            [0, 0, 0],
            [200, 0, 0],
            [0, 0, 200],
            [16, 64, 120],
            [1, 1, 1],
            *rng.multinomial(190, [1 / 3] * 3, 9),
        ):
            group = np.repeat(np.arange(4), [*sizes, 200 - sum(sizes)])
            covered = np.zeros(200, int)
            items = items_of(jnp.array(sizes), 200, tile)
            assert len(items.expert) % triton_kernels._NEIGHBOURS == 0
            for expert, begin, end in zip(*map(np.asarray, items), strict=True):
                rows = slice(begin, min(begin + tile, end))
                covered[rows] += 1
                assert (group[rows] == expert).all()
            assert (covered == 1).all()


def test_rows_computed_are_those_of_random_routing():
    """Whole tiles of each expert, of two products, and whole additions of the third."""
    sizes = np.random.default_rng(0).multinomial(65_536, [1 / 128] * 128, 50)
    of_tiles = [(-(-sizes // tile) * tile).sum(1).mean() for tile in (128, 128, 64)]
    assert rows_computed(65_536, 128) == pytest.approx(np.mean(of_tiles), rel=0.003)


def test_without_the_triton_backend_the_next_kernel_is_used_with_the_reason(monkeypatch):
    removed = {"jax.experimental.pallas.triton"}
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None if module in removed else module)
    name, reason = choose_grouped("gpu", "NVIDIA H100 PCIe")
    assert (name, "triton requires the Triton backend of Pallas" in reason) == ("tokamax", True)
    removed.add("tokamax")
    name, reason = choose_grouped("gpu", "NVIDIA H100 PCIe")
    assert (name, "pip install tokamax" in reason) == ("tiled", True)


@pytest.mark.parametrize("kind", ["Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA GeForce RTX 2080 Ti"])
def test_gpus_without_a_compiler_of_kernels_use_the_next_one_with_the_reason(kind):
    name, reason = choose_grouped("gpu", kind)
    assert (name, "8.0" in reason) == ("tiled", True)


@pytest.mark.parametrize("name", ["tiled", "triton", "tokamax", "megablox"])
@pytest.mark.parametrize(("rows", "experts", "most"), [(16_384, 8, 1.13), (65_536, 128, 1.26)])
def test_tiles_add_few_rows(name, rows, experts, most):
    """Mixtral's and Qwen3-30B-A3B's rows of 8,192 tokens."""
    assert rows < kernel_of(name).rows_computed(rows, experts) <= most * rows


def test_the_products_of_a_program_are_named():
    arguments = jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([2, 2])
    assert grouped.SCOPE in jax.jit(grouped.grouped).lower(*arguments).as_text(debug_info=True)


# Sizes of the groups, rows, inputs, outputs.
