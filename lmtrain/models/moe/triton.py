"""Grouped products on NVIDIA GPUs by our own kernels, written in Pallas (`triton_kernels.py`). Elsewhere they are
interpreted: slow, and only for tests.

    R rows, sorted by expert  E experts  I inputs  O outputs
"""

from typing import Any

import jax

from lmtrain.models.attention.kernel import before_ampere, missing_in_jax
from lmtrain.models.moe.grouped import GroupedKernel

# Rows of a tile; the last tile of an expert is partly empty. With fewer than the largest, programs read more for each
# product.
_SMALLEST, _LARGEST = 16, 128

# Contracted columns, or rows of the weight gradient, that a program adds at once, in 16 bits.
ADDED = 64


def tile_for(rows: int, experts: int) -> int:
    """The number of rows of a tile, a power of two: at most half of an expert's mean."""
    tile = _LARGEST
    while tile * 2 * experts > rows and tile > _SMALLEST:
        tile //= 2
    return tile


def rows_computed(rows: int, experts: int) -> float:
    """Half of each expert's last tile is empty, and half of its last addition of the weight gradient. Mean of the three
    products of a step."""
    tile = tile_for(rows, experts)
    return rows + experts * (2 * (tile - 1) / 2 + (min(tile, ADDED) - 1) / 2) / 3


def _by_rows(*arguments: Any) -> jax.Array:
    from lmtrain.models.moe.triton_kernels import by_rows  # imports Pallas, which is slow

    return by_rows(*arguments)


def _d_kernel(*arguments: Any) -> jax.Array:
    from lmtrain.models.moe.triton_kernels import d_kernel

    return d_kernel(*arguments)


def _unavailable(device_kind: str) -> str:
    """JAX 0.11 and later announce the removal of this backend."""
    return before_ampere(device_kind) or missing_in_jax(
        "jax.experimental.pallas.triton", "the Triton backend of Pallas"
    )


KERNEL = GroupedKernel(
    name="triton",
    by_rows=_by_rows,
    d_kernel=_d_kernel,
    rows_computed=rows_computed,
    unavailable=_unavailable,
    formats=frozenset({"fp8"}),
)
