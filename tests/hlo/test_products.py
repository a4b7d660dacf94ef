"""FLOPs of products."""

import jax
import jax.numpy as jnp
import pytest
from hlo.programs import FOUR, TPU, count_flops

from lmtrain.compiled.figures import measure


def test_a_batched_product_written_as_a_convolution_counts_positions_inside_only():
    """Three products of [8, 16] and [16, 8]: 3 of the window's 9 positions hit no hole or padding."""
    assert measure(TPU, FOUR).flops == 3 * (2 * 8 * 8 * 16)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x @ y, [(64, 128), (128, 256)]),
        (lambda x, y: jnp.einsum("bij,bkj->bik", x, y), [(3, 64, 128), (3, 32, 128)]),
        (lambda x, y: jnp.einsum("abcd,cdef->abef", x, y), [(2, 3, 16, 8), (16, 8, 4, 32)]),
        (
            lambda x, y: jax.lax.conv_general_dilated(x, y, (2, 1), ((1, 1), (0, 2)), feature_group_count=2),
            [(2, 8, 16, 16), (32, 4, 3, 5)],
        ),
        (
            lambda x, y: jax.lax.conv_general_dilated(x, y, (1, 1), ((2, 2), (2, 2)), (2, 3), (1, 2)),
            [(2, 8, 12, 12), (16, 8, 3, 3)],
        ),
    ],
    ids=["matrix", "batched", "two dimensions", "convolution", "dilated convolution"],
)
def test_without_loops_flops_equal_xlas_count(function, shapes):
    ours, theirs = count_flops(function, *shapes)
    assert ours == theirs > 0
