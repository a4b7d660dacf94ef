"""Grouped products for NVIDIA GPUs: interpreted against a loop over rows. Compiled: tests/compiled/."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.moe import triton_kernels
from lmtrain.models.moe.grouped import product
from lmtrain.models.moe.triton import rows_computed, tile_for
from lmtrain.models.moe.triton_kernels import items_of

# Sizes of the groups, rows, inputs, outputs.
SUITE = {
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


def both(x, kernel, d_y, sizes):
    """The product and the gradients of its arguments."""

    @jax.jit
    def run(x, kernel, d_y):
        y, pull = jax.vjp(lambda x, kernel: product("triton", x, kernel, jnp.array(sizes, jnp.int32)), x, kernel)
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


@pytest.mark.parametrize(
    ("sizes", "rows", "inputs", "outputs"),
    [
        *(pytest.param(*case, id=name) for name, case in SUITE.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.long) for name, case in LONG.items()),
    ],
)
def test_products_and_gradients_are_those_of_each_group(sizes, rows, inputs, outputs):
    """Partial tiles of rows and columns, groups without rows, rows without a group."""
    given = arrays(sizes, rows, inputs, outputs)
    results = both(*given, sizes)
    for name, computed, plain in zip(("y", "d_x", "d_kernel"), results, expected(*given, sizes), strict=True):
        np.testing.assert_allclose(computed, plain, rtol=1e-4, atol=1e-4, err_msg=name)
    assert not any(np.asarray(by_row)[sum(sizes) :].any() for by_row in results[:2])


def test_sums_are_float32():
    """In 16 bits only results are rounded."""
    sizes = [33, 0, 60]
    given = arrays(sizes, 100, 150, 48, jnp.bfloat16)
    exact = expected(*(a.astype(np.float32) for a in given), sizes)
    for computed, plain in zip(both(*given, sizes), exact, strict=True):
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


def test_tiles_follow_the_rows_of_an_expert():
    assert [tile_for(rows, 8) for rows in (8, 255, 256, 511, 1023, 2047, 2048, 10**6)] == [
        16, 16, 16, 16, 32, 64, 128, 128,
    ]  # fmt: skip


def test_rows_computed_are_those_of_random_routing():
    """Whole tiles of each expert, of two products, and whole additions of the third."""
    sizes = np.random.default_rng(0).multinomial(65_536, [1 / 128] * 128, 50)
    of_tiles = [(-(-sizes // tile) * tile).sum(1).mean() for tile in (128, 128, 64)]
    assert rows_computed(65_536, 128) == pytest.approx(np.mean(of_tiles), rel=0.003)
