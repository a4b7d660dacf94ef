"""Grouped products by JAX's kernel for TPUs, megablox (Gale et al. 2022, "MegaBlocks"). Elsewhere it is interpreted:
slow, and only for tests.

    R rows, sorted by expert  E experts  I inputs  O outputs
"""

from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.moe.grouped import GroupedKernel, of_experts
from lmtrain.sharding.local import platform

# Sizes of tiles in rows, and the share of the rows that they may add: a tile of several experts is computed for each of
# them. Matrices are read once for each tile, so that small ones are limited by memory: by the ratio of products to
# memory of a v5p below 166 rows, of a v5e below 240.
_ROWS = {512: 1 / 16, 256: 1 / 8}
_FEWEST_ROWS = 128
# Contracted and output columns of a tile.
_COLUMNS = 1024


def tile_for(rows: int, experts: int) -> int:
    """The number of rows of a tile."""
    fitting = (tile for tile, share in _ROWS.items() if (experts - 1) * tile <= share * rows)
    return next(fitting, _FEWEST_ROWS)


def _tiles(rows: int, experts: int, contracted: int, outputs: int) -> tuple[int, int, int]:
    return tile_for(rows, experts), min(_COLUMNS, _up(contracted)), min(_COLUMNS, _up(outputs))


def _up(size: int) -> int:
    return -(-size // 128) * 128


def by_rows(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # slow to import

    rows, x = len(x), _whole_tiles(x, len(kernel))
    tiles = _tiles(rows, len(kernel), x.shape[1], kernel.shape[1 if transposed else 2])
    y = gmm(x, kernel, sizes, dtype, tiles, transpose_rhs=transposed, interpret=platform() != "tpu")
    # the kernel does not write rows after the last expert's
    return of_experts(y, sizes)[:rows]


def d_kernel(x: jax.Array, d_y: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = _tiles(len(x), len(sizes), x.shape[1], d_y.shape[1])
    x, d_y = (_whole_tiles(array, len(sizes)) for array in (x, d_y))
    summed: jax.Array = tgmm(x.swapaxes(0, 1), d_y, sizes, dtype, tiles, interpret=platform() != "tpu")
    return summed


def _whole_tiles(x: jax.Array, experts: int) -> jax.Array:
    return jnp.pad(x, ((0, -len(x) % tile_for(len(x), experts)), (0, 0)))


def _rows_computed(rows: int, experts: int) -> float:
    """Each boundary between experts within a tile computes that tile once more."""
    return rows + (experts - 1) * (tile_for(rows, experts) - 1)


KERNEL = GroupedKernel(name="megablox", by_rows=by_rows, d_kernel=d_kernel, rows_computed=_rows_computed)
