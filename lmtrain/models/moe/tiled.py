"""Grouped products as plain operations: a loop over the experts, and over tiles of each expert's rows.

Products have the right number of FLOPs on every platform, which `lax.ragged_dot` has only on a TPU's forward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.moe.grouped import GroupedKernel

# A tile has this part of the mean number of an expert's rows, within limits: the last one of each is partly empty.
_PART_OF_MEAN = 1 / 4
_SMALLEST, _LARGEST = 16, 256


def tile_for(rows: int, experts: int) -> int:
    """The number of rows of a tile, a power of two."""
    tile = _SMALLEST
    while tile < min(rows / experts * _PART_OF_MEAN, _LARGEST):
        tile *= 2
    return tile


@jax.custom_vjp
def tiled(x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """See `GroupedKernel`."""
    return _rows_by(lambda rows, matrix: rows @ matrix, x_RI, kernel_EIO, sizes_E, kernel_EIO.shape[2])


def _backward(saved: Any, d_RO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, sizes = saved
    d_x = _rows_by(lambda rows, matrix: rows @ matrix.T, d_RO, kernel, sizes, kernel.shape[1])
    return d_x, _d_kernel(x, d_RO, sizes, kernel), None


tiled.defvjp(lambda x, kernel, sizes: (tiled(x, kernel, sizes), (x, kernel, sizes)), _backward)


def _rows_by(
    product: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, kernel: jax.Array, sizes: jax.Array, width: int
) -> jax.Array:
    tile = tile_for(len(x), len(kernel))
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def of_expert(out: jax.Array, part: Any) -> tuple[jax.Array, None]:
        matrix, begin, size = part

        def add(number: jax.Array, out: jax.Array) -> jax.Array:
            """The rows of a tile after the expert's have wrong values until the next expert's are written."""
            at = begin + number * tile
            rows = jax.lax.dynamic_slice_in_dim(padded, at, tile)
            return jax.lax.dynamic_update_slice_in_dim(out, product(rows, matrix), at, 0)

        return jax.lax.fori_loop(0, -(-size // tile), add, out), None

    zeros = jnp.zeros((len(padded), width), x.dtype)
    out, _ = jax.lax.scan(of_expert, zeros, (kernel, jnp.cumsum(sizes) - sizes, sizes))
    return _of_experts(out[: len(x)], sizes)


def _d_kernel(x: jax.Array, d_out: jax.Array, sizes: jax.Array, kernel: jax.Array) -> jax.Array:
    tile = tile_for(len(x), len(kernel))
    padded, d_padded = (jnp.pad(_of_experts(array, sizes), ((0, tile), (0, 0))) for array in (x, d_out))

    def of_expert(_: None, part: Any) -> tuple[None, jax.Array]:
        begin, size = part

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            rows, d_rows = (
                jax.lax.dynamic_slice_in_dim(array, begin + number * tile, tile) for array in (padded, d_padded)
            )
            of_this = (jnp.arange(tile) < size - number * tile)[:, None]
            return total + jnp.einsum(
                "RI,RO->IO", rows, jnp.where(of_this, d_rows, 0), preferred_element_type=jnp.float32
            )

        total = jax.lax.fori_loop(0, -(-size // tile), add, jnp.zeros(kernel.shape[1:], jnp.float32))
        return None, total.astype(kernel.dtype)

    return jax.lax.scan(of_expert, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def _of_experts(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """`x` with zeros in the rows after the last expert's."""
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, 0)


def _mean_tiles(rows: int, experts: int) -> float:
    """The last tile of an expert is half full on average."""
    return rows / experts / tile_for(rows, experts) + 1 / 2


def _rows_computed(rows: int, experts: int) -> float:
    return experts * tile_for(rows, experts) * _mean_tiles(rows, experts)


KERNEL = GroupedKernel("tiled", tiled, _rows_computed, _mean_tiles)
