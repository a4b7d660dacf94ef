"""Conversion of Hugging Face tensors to parameters and back, one tensor at a time, on any devices and processes."""

import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.config.errors import UserError
from lmtrain.hf.key_map import Piece, Row, Zeros, flatten, plan_pieces, resize_vocab, take, unflatten
from lmtrain.hf.weights import Weights, open_weights
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params
from lmtrain.models.registry import hf_family
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings

_SHOWN = 5

# Minimum number of elements of a tensor whose reading processes share.
_SMALL = 2**16


def load_hf_params(
    ref: str,
    config: ModelConfig,
    model: LanguageModel,
    layout: Layout,
    dtype: str,
    trained: Collection[str] | None = None,
) -> Any:
    """The parameters of `model` with the weights of `ref`, in `dtype`, on their devices.

    The host holds a few tensors at a time: one is read while the previous one is transferred. With several processes,
    each reads its share of the rows of every tensor, and the devices exchange the rows that they need. Embeddings are
    resized to the model's vocabulary (see `resize_vocab`); only the first `seq_len` learned positions are used.

    `trained` are the paths of the parameters that will be trained, None for all. Raises `UserError` for tensors that
    are missing, unexpected or of another shape, and for new rows in a table that is not trained.
    """
    weights = open_weights(ref)
    boxed = abstract_params(model)
    abstract = flatten(nn.meta.unbox(boxed))
    shardings = flatten(parameter_shardings(layout, boxed))
    pieces = plan_hf_pieces(config, model)
    names = _match(ref, weights, pieces, config, layout)
    _log_resizing(ref, weights, names, pieces, model.vocab_size, trained)
    flat = {path: jnp.zeros(leaf.shape, dtype, device=shardings[path]) for path, leaf in abstract.items()}
    for piece in pieces:
        if isinstance(piece.row, Zeros):
            if np.any(weights.read(names[piece.name])):
                raise UserError(f"{ref}: {piece.name} is not zero, but model.use_bias is false")
            continue
        path = piece.row.ours
        shape = abstract[path].shape if piece.layer is None else abstract[path].shape[1:]
        if jax.process_count() > 1 and _is_large(weights.shapes[names[piece.name]]):
            read = functools.partial(_read_floats, ref, weights, names[piece.name])
            spread = spread_rows(read, weights.shapes[names[piece.name]], layout)
            put = _putting(piece.row, shape, spread.rows, model.vocab_size, piece.layer is None, shardings[path])
            flat[path] = jax.block_until_ready(put(flat[path], spread.array, piece.layer or 0))
            continue
        stored = _floats(ref, piece.name, weights.read(names[piece.name]))
        array = _to_ours(piece.row, stored, shape, model.vocab_size)
        # wait, or the host runs ahead of the devices and holds one more tensor for each piece that it is ahead
        flat[path] = jax.block_until_ready(_put(flat[path], array, piece.layer, shardings[path]))
    return unflatten(flat)


def plan_hf_pieces(config: ModelConfig, model: LanguageModel) -> list[Piece]:
    """The tensors that a model of this config has in the Hugging Face format."""
    shapes = {path: leaf.shape for path, leaf in flatten(nn.meta.unbox(abstract_params(model))).items()}
    return plan_pieces(hf_family(config.type).table(config), shapes, config.num_layers, model.vocab_size)


def gather_tensors(params: Any, pieces: Sequence[Piece], layout: Layout, vocab_size: int) -> Iterator[np.ndarray]:
    """The values of the pieces, one after the other; all processes of a run have to iterate over all of them."""
    flat = flatten(params)
    whole, of_layer = gatherers(layout.replicated)

    def get(path: str, layer: int | None) -> np.ndarray:
        return np.asarray(whole(flat[path]) if layer is None else of_layer(flat[path], layer))

    return (take(piece, get, vocab_size) for piece in pieces)


@functools.cache
def gatherers(replicated: NamedSharding) -> tuple[Any, Any]:
    """Gather an array, or one layer of a stacked one, on every device; compiled once per shape."""
    whole = jax.jit(lambda array: array, out_shardings=replicated)
    of_layer = jax.jit(
        lambda array, layer: jax.lax.dynamic_index_in_dim(array, layer, keepdims=False), out_shardings=replicated
    )
    return whole, of_layer


def _match(ref: str, weights: Weights, pieces: Sequence[Piece], config: ModelConfig, layout: Layout) -> dict[str, str]:
    """The stored name of each piece. Raises `UserError` unless they match one to one, with equal shapes."""
    canonical = hf_family(config.type).canonical
    stored = {known: name for name in weights.shapes if (known := canonical(name)) is not None}
    expected = {piece.name: piece for piece in pieces}
    head = "lm_head.weight"
    if head in stored and head not in expected:
        embedding = next(piece.name for piece in pieces if isinstance(piece.row, Row) and piece.row.vocab)
        if embedding in stored and not _equal(ref, weights, stored[head], stored[embedding], layout):
            raise UserError(f"{ref}: {head} differs from {embedding}, but config.json ties them")
        del stored[head]
    problems = [f"missing {name}" for name in expected if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    for name in (name for name in expected if name in stored):
        row, ours, theirs = expected[name].row, expected[name].shape, weights.shapes[stored[name]]
        resizable = isinstance(row, Row) and (row.vocab or (row.cut and len(theirs) > 0 and theirs[0] >= ours[0]))
        if theirs[1:] != ours[1:] if resizable else theirs != ours:
            problems.append(f"{name} is {list(theirs)}, expected {list(ours)}")
    counts = {
        name: weights.shapes[stored[name]][:1]
        for name, piece in expected.items()
        if name in stored and _is_vocab(piece)
    }
    if len(set(counts.values())) > 1:
        problems.append(" but ".join(f"{name} has {count[0] if count else 0:,} rows" for name, count in counts.items()))
    problems += [f"{name} has no rows" for name, count in counts.items() if count in ((), (0,))]
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        listed = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        raise UserError(f"{ref}: its weights do not match this model{listed}{more}")
    return stored


def _is_vocab(piece: Piece) -> bool:
    return isinstance(piece.row, Row) and piece.row.vocab


def _equal(ref: str, weights: Weights, one: str, other: str, layout: Layout) -> bool:
    """Whether two tensors are equal. With several processes, each reads its share of the rows."""
    if (shape := weights.shapes[one]) != weights.shapes[other]:
        return False
    if jax.process_count() == 1:
        return np.array_equal(weights.read(one), weights.read(other))
    parts = (spread_rows(functools.partial(_read_floats, ref, weights, name), shape, layout) for name in (one, other))
    return bool(jax.jit(jnp.array_equal, out_shardings=layout.replicated)(*(part.array for part in parts)))


def _log_resizing(
    ref: str,
    weights: Weights,
    names: dict[str, str],
    pieces: Sequence[Piece],
    vocab_size: int,
    trained: Collection[str] | None,
) -> None:
    for piece in pieces:
        theirs = weights.shapes[names[piece.name]]
        if theirs == piece.shape or not isinstance(piece.row, Row):
            continue
        if theirs[0] > piece.shape[0]:
            what = f"the first {piece.shape[0]:,} of {theirs[0]:,} rows are used"
        elif trained is not None and piece.row.ours not in trained:
            raise UserError(
                f"{ref}: {piece.name} has {theirs[0]:,} rows for {vocab_size:,} tokens, and the new rows would stay "
                "untrained; set lora.modules_to_save: [embed_tokens, lm_head]"
            )
        else:
            what = f"{vocab_size - theirs[0]:,} rows are added to {theirs[0]:,}, each the mean of the existing rows"
        log.info(f"{ref}: {piece.name}: {what}, to fit " + ("the tokenizer" if piece.row.vocab else "model.seq_len"))


def _to_ours(row: Row, array: Any, shape: tuple[int, ...], vocab_size: int, numpy: Any = np) -> Any:
    """A stored tensor in our layout, converted with numpy, or on the devices with `jax.numpy`."""
    if row.vocab:
        return resize_vocab(array, vocab_size, shape[0], numpy)
    return row.to_ours(array[: shape[0]] if row.cut else array, shape)


def _is_large(shape: tuple[int, ...]) -> bool:
    """Whether processes share the reading of a tensor; small ones are read by every process."""
    return len(shape) > 1 and math.prod(shape) >= _SMALL


def _floats(ref: str, name: str, array: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(
            f"{ref}: {name} holds {array.dtype}, not floating-point numbers; quantized weights are not supported"
        )
    return array


def _read_floats(ref: str, weights: Weights, name: str, first: int, last: int) -> np.ndarray:
    rows = _floats(ref, name, weights.read_rows(name, first, last))
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows  # the devices have no float64


class Spread(NamedTuple):
    """A tensor whose rows are split over all devices; rows after the first `rows` are padding."""

    array: jax.Array
    rows: int


def spread_rows(read: Callable[[int, int], np.ndarray], shape: tuple[int, ...], layout: Layout) -> Spread:
    """A tensor of this shape; each process reads the rows of its own devices with `read(first, last)`."""
    rows, size = shape[0], layout.mesh.size
    whole = (-(-rows // size) * size, *shape[1:])

    def part(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(whole[0])
        found = read(min(first, rows), min(last, rows))
        return np.pad(found, ((0, last - first - len(found)), *((0, 0) for _ in shape[1:])))

    sharding = NamedSharding(layout.mesh, PartitionSpec(layout.mesh.axis_names))
    return Spread(jax.make_array_from_callback(whole, sharding, part), rows)


@functools.cache
def _putting(
    row: Row, shape: tuple[int, ...], rows: int, vocab_size: int, is_whole: bool, sharding: NamedSharding
) -> Any:
    """`(target, spread, layer) -> target`, compiled once for all tensors of the same shape and layout."""

    def put(target: jax.Array, spread: jax.Array, layer: int) -> jax.Array:
        array = _to_ours(row, spread[:rows], shape, vocab_size, jnp).astype(target.dtype)
        return array if is_whole else jax.lax.dynamic_update_index_in_dim(target, array, layer, 0)

    return jax.jit(put, donate_argnums=0, out_shardings=sharding)


def _put(target: jax.Array, array: np.ndarray, layer: int | None, sharding: NamedSharding) -> jax.Array:
    """`target`, whose memory is reused, with its values, or those of one layer, replaced by `array`."""
    array = array.astype(target.dtype, copy=False)
    if layer is None:
        return _spread(array, sharding)
    placed = _spread(array, NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:])))
    updated: jax.Array = _updating(sharding)(target, placed, layer)
    return updated


@functools.cache
def _updating(sharding: NamedSharding) -> Any:
    """`(stacked, new, layer) -> stacked`, compiled once for all stacked parameters of the same shape and layout."""

    def update(stacked: jax.Array, new: jax.Array, layer: int) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stacked, new, layer, 0)

    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


def _spread(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.ascontiguousarray(array[index]))
