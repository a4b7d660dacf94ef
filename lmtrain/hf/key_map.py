"""Key map between our parameters and a Hugging Face weight file: one table, used in both directions.

Our parameters are a tree with slash-separated paths (`blocks/attn/qkv/kernel`), stacked over layers. Theirs have flat
names, one per layer (`transformer.h.{layer}.attn.c_attn.weight`). A row maps a path to a name and describes how the
shapes correspond. A parameter that only one side has is an error.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """Maps `ours` to `theirs` and back. With `{layer}` in `theirs`, the first dimension of ours is the layer, with
    `{expert}` the second one the expert. `layers` are the numbers of the layers that have it; None: all.

    `rows` is the number of our dimensions (without the layer) that become the first dimension of their matrix; the
    others become the second. None keeps the shape, 0 flattens to a vector. `transpose` swaps their two dimensions,
    as in torch's Linear. With `vocab`, the first dimension is the vocabulary, which ours pads. With `cut`, ours may
    be the first rows of theirs, for fewer positions. Theirs is ours multiplied by `factor`.
    """

    ours: str
    theirs: str
    rows: int | None = None
    transpose: bool = False
    vocab: bool = False
    cut: bool = False
    layers: tuple[int, ...] | None = None
    factor: float = 1.0

    @property
    def is_stacked(self) -> bool:
        return "{layer}" in self.theirs

    @property
    def stacked_dims(self) -> int:
        """How many of our first dimensions are layers or experts, of which each has its own tensor."""
        return sum(name in self.theirs for name in ("{layer}", "{expert}"))

    def to_theirs(self, array: np.ndarray, vocab_size: int) -> np.ndarray:
        """Convert our array (of one layer) to their tensor."""
        array = self._arranged(array, vocab_size)
        if self.factor != 1:
            array = (array * self.factor).astype(array.dtype)
        # contiguous, since a file is written from the buffer and ignores strides
        return np.ascontiguousarray(array)

    def _arranged(self, array: np.ndarray, vocab_size: int) -> np.ndarray:
        if self.vocab:
            array = array[:vocab_size]
        if self.rows is not None:
            first = int(np.prod(array.shape[: self.rows]))
            array = array.reshape(first, -1) if self.rows else array.reshape(-1)
        return array.T if self.transpose else array

    def their_shape(self, shape: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        return self._arranged(np.broadcast_to(np.int8(0), shape), vocab_size).shape

    def to_ours(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Convert their tensor to our array of `shape` (of one layer). Raises ValueError if the sizes differ."""
        array = (array.T if self.transpose else array).reshape(shape)
        return array if self.factor == 1 else array / self.factor


@dataclass(frozen=True)
class Zeros:
    """Their tensor that our model lacks because it is all zeros, such as a bias with use_bias false."""

    theirs: str
    shape: tuple[int, ...]
    is_stacked: bool = True


Table = Sequence[Row | Zeros]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One of their tensors: its name, shape, row of the table, and its place in our array: layer and expert."""

    name: str
    shape: tuple[int, ...]
    row: Row | Zeros
    index: tuple[int, ...] = ()


def build_pieces(table: Table, shapes: Mapping[str, Sequence[int]], num_layers: int, vocab_size: int) -> list[Piece]:
    """All of their tensors for parameters of these shapes (by path), grouped by layer.

    Raises ValueError for a parameter without a row, or a row without a parameter.
    """
    rows, parameters = {row.ours for row in table if isinstance(row, Row)}, set(shapes)
    if rows != parameters:
        missing, unexpected = sorted(rows - parameters)[:5], sorted(parameters - rows)[:5]
        raise ValueError(f"parameters do not match the table: missing {missing}, unexpected {unexpected}")

    def pieces(row: Row | Zeros, layer: int | None) -> Iterator[Piece]:
        place = row.layers.index(layer) if isinstance(row, Row) and row.layers is not None else layer
        index = () if place is None else (place,)
        if isinstance(row, Zeros):
            yield Piece(name=row.theirs.format(layer=layer), shape=row.shape, row=row, index=index)
            return
        theirs = row.their_shape(shapes[row.ours][row.stacked_dims :], vocab_size)
        if row.stacked_dims < 2:
            yield Piece(name=row.theirs.format(layer=layer), shape=theirs, row=row, index=index)
            return
        for expert in range(shapes[row.ours][1]):
            yield Piece(
                name=row.theirs.format(layer=layer, expert=expert), shape=theirs, row=row, index=(*index, expert)
            )

    unstacked = [piece for row in table if not row.is_stacked for piece in pieces(row, None)]
    stacked = [row for row in table if row.is_stacked]
    return unstacked + [
        piece
        for layer in range(num_layers)
        for row in stacked
        if isinstance(row, Zeros) or row.layers is None or layer in row.layers
        for piece in pieces(row, layer)
    ]


def take(piece: Piece, get: Callable[[str, tuple[int, ...]], np.ndarray], vocab_size: int) -> np.ndarray:
    """Values of one of their tensors. `get(path, index)` returns our array at this index of its first dimensions."""
    if isinstance(piece.row, Zeros):
        return np.zeros(piece.shape, np.float32)
    return piece.row.to_theirs(get(piece.row.ours, piece.index), vocab_size)


def resize_vocab(array: Any, vocab_size: int, rows: int, numpy: Any = np) -> Any:
    """Resize embeddings [their tokens, D] to [rows, D] for `vocab_size` tokens, with zeros as padding.

    Surplus tokens are dropped. New tokens are initialized with the mean of all, so that they are neither likely nor
    unlikely (Hewitt 2021, "Initializing New Word Embeddings"). `numpy` is the module of the array: numpy or jax.numpy.
    """
    kept = array[:vocab_size]
    mean = array.astype(np.float32).mean(0, keepdims=True).astype(array.dtype)
    new = numpy.repeat(mean, vocab_size - len(kept), axis=0)
    padding = numpy.zeros((rows - vocab_size, array.shape[1]), array.dtype)
    return numpy.concatenate([kept, new, padding])
