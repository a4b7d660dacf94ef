"""The map between our parameters and a Hugging Face weight file: one table, read in both directions.

Our parameters are a tree with slashes as paths (`blocks/attn/qkv/kernel`), stacked over layers; theirs are flat names,
one per layer (`transformer.h.{layer}.attn.c_attn.weight`). A row says which is which and how the shapes correspond.
Whatever one side has and the other does not is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """`ours` <-> `theirs`. With `{layer}` in `theirs`, the first dimension of ours is the layer.

    `rows` is the number of our dimensions (layer apart) that become the first dimension of their matrix, the rest
    become the second; None keeps the shape, 0 flattens to a vector. `transpose` swaps their two dimensions, as
    torch's Linear has them against ours. With `vocab`, the first dimension is the vocabulary, which ours pads. With
    `cut`, ours may be the first rows of theirs: fewer positions than theirs was made for.
    """

    ours: str
    theirs: str
    rows: int | None = None
    transpose: bool = False
    vocab: bool = False
    cut: bool = False

    @property
    def is_stacked(self) -> bool:
        return "{layer}" in self.theirs

    def to_theirs(self, array: np.ndarray, vocab_size: int) -> np.ndarray:
        """Their tensor out of our array (of one layer)."""
        if self.vocab:
            array = array[:vocab_size]
        if self.rows is not None:
            first = int(np.prod(array.shape[: self.rows]))
            array = array.reshape(first, -1) if self.rows else array.reshape(-1)
        # contiguous, because a file is written from the buffer whatever the strides say
        return np.ascontiguousarray(array.T if self.transpose else array)

    def their_shape(self, shape: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        """The shape of `to_theirs` of an array of this shape."""
        return self.to_theirs(np.broadcast_to(np.int8(0), shape), vocab_size).shape

    def to_ours(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Our array of `shape` (of one layer) out of their tensor. Raises ValueError if the sizes differ."""
        return (array.T if self.transpose else array).reshape(shape)


@dataclass(frozen=True)
class Zeros:
    """A tensor of theirs that a model of ours has not, since it would be all zeros: a bias, with use_bias false."""

    theirs: str
    shape: tuple[int, ...]
    is_stacked: bool = True


Table = Sequence[Row | Zeros]


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs: its name and shape, and the row and layer it belongs to."""

    name: str
    shape: tuple[int, ...]
    row: Row | Zeros
    layer: int | None


def plan_pieces(table: Table, shapes: Mapping[str, Sequence[int]], num_layers: int, vocab_size: int) -> list[Piece]:
    """All tensors of theirs for parameters of these shapes (by path), those of a layer together.

    Raises ValueError for a parameter without a row, or a row without one.
    """
    _check_names({row.ours for row in table if isinstance(row, Row)}, set(shapes), "parameters")

    def piece(row: Row | Zeros, layer: int | None) -> Piece:
        name = row.theirs if layer is None else row.theirs.format(layer=layer)
        if isinstance(row, Zeros):
            return Piece(name, row.shape, row, layer)
        shape = shapes[row.ours] if layer is None else shapes[row.ours][1:]
        return Piece(name, row.their_shape(shape, vocab_size), row, layer)

    whole = [piece(row, None) for row in table if not row.is_stacked]
    stacked = [row for row in table if row.is_stacked]
    return whole + [piece(row, layer) for layer in range(num_layers) for row in stacked]


def take(piece: Piece, get: Callable[[str, int | None], np.ndarray], vocab_size: int) -> np.ndarray:
    """A tensor of theirs; `get(path, layer)` gives our array, of that layer if it is stacked."""
    if isinstance(piece.row, Zeros):
        return np.zeros(piece.shape, np.float32)
    return piece.row.to_theirs(get(piece.row.ours, piece.layer), vocab_size)


def to_hf(table: Table, params: Mapping[str, Any], num_layers: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Our parameters as their tensors, all in memory."""
    flat = {path: np.asarray(array) for path, array in flatten(params).items()}
    shapes = {path: array.shape for path, array in flat.items()}

    def get(path: str, layer: int | None) -> np.ndarray:
        return flat[path] if layer is None else flat[path][layer]

    return {piece.name: take(piece, get, vocab_size) for piece in plan_pieces(table, shapes, num_layers, vocab_size)}


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps -> paths with slashes."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        flat.update(flatten(value, path) if isinstance(value, Mapping) else {path: value})
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree


def resize_vocab(array: Any, vocab_size: int, rows: int, numpy: Any = np) -> Any:
    """[their tokens, D] -> [rows, D] for `vocab_size` tokens of ours, the rest padding.

    Tokens that they have beyond ours are left out; those that we have beyond theirs begin as the mean of all, so that
    they are neither likely nor unlikely (Hewitt 2021, "Initializing New Word Embeddings"); padding is 0. `numpy` is
    the module of the array: numpy, or jax.numpy.
    """
    kept = array[:vocab_size]
    mean = array.astype(np.float32).mean(0, keepdims=True).astype(array.dtype)
    new = numpy.repeat(mean, vocab_size - len(kept), axis=0)
    padding = numpy.zeros((rows - vocab_size, array.shape[1]), array.dtype)
    return numpy.concatenate([kept, new, padding])


def _check_names(expected: set[str], found: set[str], what: str) -> None:
    if expected != found:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise ValueError(f"{what} do not match the table: missing {missing[:5]}, unexpected {unexpected[:5]}")
