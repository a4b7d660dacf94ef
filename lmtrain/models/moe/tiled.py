"""Grouped products as plain operations: a loop over the experts, and over tiles of each expert's rows.

Products have the right number of FLOPs on every platform, which `lax.ragged_dot` has only on a TPU's forward pass.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.layers.quantized import contract
from lmtrain.models.moe.grouped import GroupedKernel, of_experts

# A tile has this part of the mean number of an expert's rows, within limits: the last one of each is partly empty.
_PART_OF_MEAN = 1 / 4
_SMALLEST, _LARGEST = 16, 256


def tile_for(rows: int, experts: int) -> int:
    """The number of rows of a tile, a power of two."""
    tile = _SMALLEST
    while tile < min(rows / experts * _PART_OF_MEAN, _LARGEST):
        tile *= 2
    return tile


def by_rows(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    tile = tile_for(len(x), len(kernel))
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    padded = jnp.pad(x, ((0, tile), (0, 0)))

    def of_expert(out: jax.Array, part: Any) -> tuple[jax.Array, None]:
        matrix, begin, size = part

        def add(number: jax.Array, out: jax.Array) -> jax.Array:
            """The rows of a tile after the expert's have wrong values until the next expert's are written."""
            at = begin + number * tile
            rows = jax.lax.dynamic_slice_in_dim(padded, at, tile)
            y = contract(rows, matrix, dims, dtype).astype(dtype)
            return jax.lax.dynamic_update_slice_in_dim(out, y, at, 0)

        return jax.lax.fori_loop(0, -(-size // tile), add, out), None

    zeros = jnp.zeros((len(padded), kernel.shape[1 if transposed else 2]), dtype)
    out, _ = jax.lax.scan(of_expert, zeros, (kernel, jnp.cumsum(sizes) - sizes, sizes))
    return of_experts(out[: len(x)], sizes)


def d_kernel(x: jax.Array, d_y: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    tile = tile_for(len(x), len(sizes))
    padded, d_padded = (jnp.pad(of_experts(array, sizes), ((0, tile), (0, 0))) for array in (x, d_y))

    def of_expert(_: None, part: Any) -> tuple[None, jax.Array]:
        begin, size = part

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            rows, d_rows = (
                jax.lax.dynamic_slice_in_dim(array, begin + number * tile, tile) for array in (padded, d_padded)
            )
            of_this = (jnp.arange(tile) < size - number * tile)[:, None]
            d_rows = jnp.where(of_this, d_rows, jnp.zeros((), d_rows.dtype))
            added = contract(rows, d_rows, (((0,), (0,)), ((), ())), jnp.float32)
            return total + added.astype(jnp.float32)

        total = jax.lax.fori_loop(0, -(-size // tile), add, jnp.zeros((x.shape[1], d_y.shape[1]), jnp.float32))
        return None, total.astype(dtype)

    return jax.lax.scan(of_expert, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def _mean_tiles(rows: int, experts: int) -> float:
    """The last tile of an expert is half full on average."""
    return rows / experts / tile_for(rows, experts) + 1 / 2


def _rows_computed(rows: int, experts: int) -> float:
    return experts * tile_for(rows, experts) * _mean_tiles(rows, experts)


KERNEL = GroupedKernel(
    name="tiled",
    by_rows=by_rows,
    d_kernel=d_kernel,
    rows_computed=_rows_computed,
    mean_trips=_mean_tiles,
    formats=frozenset({"fp8", "int8"}),
)
