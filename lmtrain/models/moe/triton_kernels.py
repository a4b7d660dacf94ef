"""The kernels of grouped products for NVIDIA GPUs: rows times their expert's matrix, and the weight gradient.

A work item is a tile of rows of one expert. Tiles start with the expert's first row, so that only the last of each is
partly empty. Their number depends on the routing, the number of programs must not: the last programs have no rows.
Rows after the last expert's are items too, which write zeros. No two programs write to the same place, and sums stay
in registers: results are bitwise reproducible.

    R rows, sorted by expert  E experts  I inputs  O outputs
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.attention.kernel import is_hopper_or_later
from lmtrain.models.moe.triton import ADDED, tile_for
from lmtrain.sharding.local import device_kind, platform

# Programs that run at the same time have this many tiles of rows, and the next tiles of columns: a compact block of the
# result, whose operands are few enough for the L2 cache.
_NEIGHBOURS = 8


class Blocks(NamedTuple):
    """Columns of a program's tile of the result, its warps, and the stages of its loads."""

    columns: int
    warps: int
    stages: int


# By rows of a tile: the largest that fit into the shared memory of all GPUs from compute capability 8.0 on (96 KiB with
# 128 rows), and into registers without spilling. From 9.0 on, server GPUs have memory for another stage.
SMALL = {128: Blocks(256, 8, 3)} | dict.fromkeys((64, 32, 16), Blocks(128, 4, 3))
LARGE = {rows: blocks._replace(stages=4) for rows, blocks in SMALL.items()}

# Rows of a tile of the weight gradient.
_INPUTS = 128


def _blocks_for(rows: int) -> Blocks:
    """Block sizes for tiles of this number of rows, on the devices that the program is compiled for."""
    return (LARGE if is_hopper_or_later(device_kind()) else SMALL)[rows]


class Items(NamedTuple):
    """Work items, int32: the expert, or E for rows after the last expert's; the first row; where the expert's end."""

    expert: Any
    begin: Any
    end: Any


def items_of(sizes_E: jax.Array, rows: int, tile: int) -> Items:
    """The items of all rows, then items without rows, up to the most that any sizes need."""
    ends = jnp.append(_ends(sizes_E), jnp.int32(rows))
    begins = jnp.pad(ends[:-1], (1, 0))
    tiles = pl.cdiv(ends - begins, tile)
    tile_ends = jnp.cumsum(tiles)
    most = (rows + len(ends) * (tile - 1)) // tile
    number = jnp.arange(pl.cdiv(most, _NEIGHBOURS) * _NEIGHBOURS, dtype=jnp.int32)
    # a comparison with all ends is one operation, a binary search a loop of many
    expert = (tile_ends[:-1] <= number[:, None]).sum(1, dtype=jnp.int32)
    begin = begins[expert] + (number - (tile_ends - tiles)[expert]) * tile
    return Items(expert, begin, ends[expert])


def _ends(sizes_E: jax.Array) -> jax.Array:
    return jnp.cumsum(sizes_E.astype(jnp.int32))


def by_rows(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool, dtype: Any) -> jax.Array:
    """See `GroupedKernel`; `x` and `kernel` have the same number of bits."""
    assert x.dtype.itemsize == kernel.dtype.itemsize
    (rows, inputs), outputs = x.shape, kernel.shape[1 if transposed else 2]
    tile = tile_for(rows, len(kernel))
    blocks = _blocks_for(tile)
    columns, part = _tile_of(outputs, blocks.columns), _tile_of(inputs, _added(x))
    items = items_of(sizes, rows, tile)
    y: jax.Array = _call(
        functools.partial(_rows_kernel, tile=tile, columns=columns, part=part, transposed=transposed),
        "grouped_product_transposed" if transposed else "grouped_product",
        blocks,
        (_NEIGHBOURS, pl.cdiv(outputs, columns), len(items.begin) // _NEIGHBOURS),
        jax.ShapeDtypeStruct((rows, outputs), dtype),
    )(items, x, kernel)
    return y


def _rows_kernel(
    items: Items, x_ref: Any, kernel_ref: Any, y_ref: Any, *, tile: int, columns: int, part: int, transposed: bool
) -> None:
    number = pl.program_id(2) * _NEIGHBOURS + pl.program_id(0)
    expert, rows = items.expert[number], _Range(items.begin[number], tile, items.end[number])
    inputs, column = x_ref.shape[1], _Range.tile(pl.program_id(1), columns, y_ref.shape[1])

    def add(step: Any, total: jax.Array) -> jax.Array:
        inner = _Range.tile(step, part, inputs)
        matrix = _load(kernel_ref, expert, *((column, inner) if transposed else (inner, column)))
        return total + plgpu.dot(_load(x_ref, rows, inner), matrix, trans_b=transposed)

    steps = jnp.where(expert < len(kernel_ref), jnp.int32(pl.cdiv(inputs, part)), 0)
    total = jax.lax.fori_loop(jnp.int32(0), steps, add, jnp.zeros((tile, columns), jnp.float32))
    _store(y_ref, total, rows, column)


def d_kernel(x: jax.Array, d_y: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    experts, inputs, outputs = len(sizes), x.shape[1], d_y.shape[1]
    blocks = _blocks_for(_INPUTS)
    tile, columns = _tile_of(inputs, _INPUTS), _tile_of(outputs, blocks.columns)
    tiles, part = pl.cdiv(inputs, tile), min(tile_for(len(x), experts), _added(x))
    neighbours = math.gcd(experts * tiles, _NEIGHBOURS)
    ends = _ends(sizes)
    summed: jax.Array = _call(
        functools.partial(_d_kernel_kernel, tile=tile, columns=columns, part=part, tiles=tiles),
        "grouped_product_d_kernel",
        blocks,
        (neighbours, pl.cdiv(outputs, columns), experts * tiles // neighbours),
        jax.ShapeDtypeStruct((experts, inputs, outputs), dtype),
    )(ends - sizes, ends, x, d_y)
    return summed


def _d_kernel_kernel(
    begin_ref: Any,
    end_ref: Any,
    x_ref: Any,
    d_y_ref: Any,
    d_ref: Any,
    *,
    tile: int,
    columns: int,
    part: int,
    tiles: int,
) -> None:
    number = pl.program_id(2) * pl.num_programs(0) + pl.program_id(0)
    expert, inputs = number // tiles, _Range.tile(number % tiles, tile, d_ref.shape[1])
    column = _Range.tile(pl.program_id(1), columns, d_ref.shape[2])
    begin, end = begin_ref[expert], end_ref[expert]

    def add(step: Any, total: jax.Array) -> jax.Array:
        rows = _Range(begin + step * part, part, end)
        return total + plgpu.dot(_load(x_ref, rows, inputs), _load(d_y_ref, rows, column), trans_a=True)

    zeros = jnp.zeros((tile, columns), jnp.float32)
    total = jax.lax.fori_loop(jnp.int32(0), pl.cdiv(end - begin, part), add, zeros)
    _store(d_ref, total, expert, inputs, column)


def _call(kernel: Any, name: str, blocks: Blocks, grid: tuple[int, ...], out_shape: jax.ShapeDtypeStruct) -> Any:
    """`pallas_call` of a kernel that reads and writes parts of whole arrays."""
    options = plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages)
    interpret = platform() != "gpu"
    return pl.pallas_call(
        kernel, name=name, grid=grid, out_shape=out_shape, compiler_params=options, interpret=interpret
    )


class _Range(NamedTuple):
    """`size` indices of a dimension from `begin` on, of which those before `end` exist; all of them if it is None."""

    begin: Any
    size: int
    end: Any

    @classmethod
    def tile(cls, number: Any, size: int, total: int) -> "_Range":
        """The tile of this number, of a dimension of size `total`."""
        return cls(number * size, size, total if total % size else None)


def _load(ref: Any, *index: Any) -> jax.Array:
    """The block at an index that ends with two ranges; 0 where nothing exists."""
    at, exists = _block(*index)
    loaded: jax.Array = plgpu.load(ref.at[at], mask=exists, other=None if exists is None else 0.0)
    return loaded


def _store(ref: Any, block: jax.Array, *index: Any) -> None:
    at, exists = _block(*index)
    plgpu.store(ref.at[at], block.astype(ref.dtype), mask=exists)


def _block(*index: Any) -> tuple[tuple[Any, ...], jax.Array | None]:
    """The slices of a block, and the mask of what exists of it; None if all does."""
    *first, rows, columns = index
    masks = [
        (part.begin + jnp.arange(part.size) < part.end).reshape(shape)
        for part, shape in ((rows, (-1, 1)), (columns, (1, -1)))
        if part.end is not None
    ]
    slices = (pl.dslice(part.begin, part.size) for part in (rows, columns))
    return (*first, *slices), functools.reduce(jnp.logical_and, masks) if masks else None


def _tile_of(size: int, largest: int) -> int:
    """The size of a tile of a dimension, a power of two; half of the largest where this computes 10% less."""
    half = largest // 2
    saved = pl.cdiv(size, largest) * largest - pl.cdiv(size, half) * half
    return min(half if saved * 10 > size else largest, max(pl.next_power_of_2(size), 16))


def _added(x: jax.Array) -> int:
    """The size of the contracted dimension that is added at once."""
    return ADDED * 2 // x.dtype.itemsize
