"""Stored tensors as parameters on their devices, one tensor at a time, on any devices and processes.

The host holds a few tensors at a time. With several processes, each reads its share of the rows of every large tensor,
and the devices exchange the rows that they need.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Piece, Row, Zeros, resize_vocab
from lmtrain.hf.weight_files import Weights
from lmtrain.models.params import flatten, unflatten
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings

# Minimum number of elements of a tensor whose reading processes share.
_MIN_SHARED = 2**16


def load_tensors(
    where: str,
    weights: Weights,
    names: Mapping[str, str],
    pieces: Iterable[Piece],
    boxed: Any,
    vocab_size: int,
    layout: Layout,
    dtype: str,
) -> Any:
    """Parameters like the abstract ones in `boxed`, in `dtype`, with the values of `pieces`.

    `names` are the names in the file by those of the pieces. Embeddings are resized to `vocab_size` (see
    `resize_vocab`); only the first learned positions are used. `where` begins the errors: `UserError` for tensors that
    have no floating-point numbers, or are not zero although the model lacks them.
    """
    abstract, shardings = flatten(nn.meta.unbox(boxed)), flatten(parameter_shardings(layout, boxed))

    def load(name: str, row: Row, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
        stored = weights.shapes[name]
        if jax.process_count() > 1 and len(stored) > 1 and math.prod(stored) >= _MIN_SHARED:
            split = split_rows(functools.partial(_read_rows, where, weights, name), stored, layout)
            return jax.block_until_ready(_converting(row, shape, stored[0], vocab_size, dtype, sharding)(split))
        array = _to_ours(row, _floats(where, name, weights.read(name)), shape, vocab_size).astype(dtype, copy=False)
        return jax.make_array_from_callback(shape, sharding, lambda index: np.ascontiguousarray(array[index]))

    flat: dict[str, jax.Array] = {}
    for piece in pieces:
        row, name = piece.row, names[piece.name]
        if isinstance(row, Zeros):
            if np.any(weights.read(name)):
                raise UserError(f"{where}: {piece.name} is not zero, but model.use_bias is false")
            continue
        shape, sharding = abstract[row.ours].shape, shardings[row.ours]
        if not piece.index:
            flat[row.ours] = load(name, row, shape, sharding)
        else:
            if row.ours not in flat:
                flat[row.ours] = jnp.zeros(shape, dtype, device=sharding)
            dims = len(piece.index)
            array = load(name, row, shape[dims:], NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[dims:])))
            flat[row.ours] = _with_part(sharding)(flat[row.ours], array, piece.index)
        # wait, or the host runs ahead of the devices and holds one more tensor for each piece that it is ahead
        jax.block_until_ready(flat[row.ours])
    return unflatten(flat)


def are_equal(where: str, weights: Weights, name: str, other: str, layout: Layout) -> bool:
    """Whether two tensors are equal. With several processes, each reads its share of the rows."""
    if (shape := weights.shapes[name]) != weights.shapes[other]:
        return False
    if jax.process_count() == 1:
        return np.array_equal(weights.read(name), weights.read(other))
    read = (functools.partial(_read_rows, where, weights, stored) for stored in (name, other))
    parts = [split_rows(read_rows, shape, layout) for read_rows in read]
    return bool(jax.jit(jnp.array_equal, out_shardings=layout.replicated)(*parts))


@functools.cache
def _with_part(sharding: NamedSharding) -> Any:
    """`(stacked, array, index) -> stacked`, compiled once for all stacked parameters of the same shape and layout."""

    def update(stacked: jax.Array, array: jax.Array, index: tuple[int, ...]) -> jax.Array:
        return jax.lax.dynamic_update_slice(
            stacked, jnp.expand_dims(array, tuple(range(len(index)))), (*index, *[0] * array.ndim)
        )

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


@functools.cache
def _converting(
    row: Row, shape: tuple[int, ...], rows: int, vocab_size: int, dtype: str, sharding: NamedSharding
) -> Any:
    """`split rows -> our array`, compiled once for all tensors of the same shape and layout."""
    return jax.jit(
        lambda split: _to_ours(row, split[:rows], shape, vocab_size, jnp).astype(dtype), out_shardings=sharding
    )


def _to_ours(row: Row, array: Any, shape: tuple[int, ...], vocab_size: int, numpy: Any = np) -> Any:
    """A stored tensor in our layout, converted with numpy, or on the devices with `jax.numpy`."""
    if row.vocab:
        return resize_vocab(array, vocab_size, shape[0], numpy)
    return row.to_ours(array[: shape[0]] if row.cut else array, shape)


def split_rows(read: Callable[[int, int], np.ndarray], shape: tuple[int, ...], layout: Layout) -> jax.Array:
    """A tensor whose rows are split over all devices, padded to a multiple of their number.

    Each process reads the rows of its own devices with `read(first, last)`.
    """
    rows, size = shape[0], layout.mesh.size
    padded = (-(-rows // size) * size, *shape[1:])

    def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(padded[0])
        array = read(min(first, rows), min(last, rows))
        return np.pad(array, ((0, last - first - len(array)), *((0, 0) for _ in shape[1:])))

    return jax.make_array_from_callback(padded, NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names)), part)


def _read_rows(where: str, weights: Weights, name: str, first: int, last: int) -> np.ndarray:
    rows = _floats(where, name, weights.read_rows(name, first, last))
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows  # the devices have no float64


def _floats(where: str, name: str, array: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(
            f"{where}: {name} holds {array.dtype}, not floating-point numbers; quantized weights are not supported"
        )
    return array
