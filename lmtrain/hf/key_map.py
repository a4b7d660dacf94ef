"""Key map between our parameters and a Hugging Face weight file: one table, used in both directions.

Our parameters are a tree with slash-separated paths (`blocks/attn/qkv/kernel`), stacked over layers. Theirs have flat
names, one per layer (`transformer.h.{layer}.attn.c_attn.weight`). A row maps a path to a name and describes how the
shapes correspond. Rows with one name are parts of one tensor. A parameter that only one side has is an error.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """Maps `ours` to `theirs` and back. With `{layer}` in `theirs`, the first dimension of ours is the layer, with
    `{expert}` the second one the expert. `layers` are the numbers of the layers that have it; None: all. `named_in` are
    those in which it has this name, if it has others elsewhere; `also` is another name that files can have.

    `rows` is the number of our dimensions (without the layer) that become the first dimension of their matrix; the
    others become the second. None keeps the shape, 0 flattens to a vector. `transpose` swaps their two dimensions,
    as in torch's Linear. With `vocab`, the first dimension is the vocabulary, which ours pads. With `cut`, ours may
    be the first rows of theirs, for fewer positions. Theirs is ours multiplied by `factor`. What is `exact` has float32
    in every file and every run. `has_middle`: their matrix has a dimension of 1 between its two, as the kernel of a
    depthwise convolution in torch. `pairs`: the first dimension of theirs has blocks of the first of these sizes, whose
    last dimensions, of the second size, are rotated: in pairs of neighbours there, and in two halves here. Modules
    after the last layer have the numbers after it as `layers`.

    Rows with equal `theirs` are joined in their order by a dimension of their tensor, `axis`; with `groups`, each has
    that many equal parts, and the tensor has the first parts of all rows, then the second ones.
    """

    ours: str
    theirs: str
    rows: int | None = None
    transpose: bool = False
    vocab: bool = False
    cut: bool = False
    layers: tuple[int, ...] | None = None
    named_in: tuple[int, ...] | None = None
    factor: float = 1.0
    exact: bool = False
    also: str | None = None
    has_middle: bool = False
    groups: int = 1
    axis: int = 0
    pairs: tuple[int, int] | None = None

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
        if self.pairs is not None:
            array = array[_in_pairs(len(array), *self.pairs)]
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
        array = array.T if self.transpose else array
        return array[:, None] if self.has_middle else array

    def their_shape(self, shape: Sequence[int], vocab_size: int) -> tuple[int, ...]:
        return self._arranged(np.broadcast_to(np.int8(0), shape), vocab_size).shape

    def to_ours(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Convert their tensor to our array of `shape` (of one layer). Raises ValueError if the sizes differ."""
        array = array[:, 0] if self.has_middle else array
        if self.pairs is not None:
            array = array[np.argsort(_in_pairs(len(array), *self.pairs))]
        array = (array.T if self.transpose else array).reshape(shape)
        return array if self.factor == 1 else array / self.factor


def _in_pairs(length: int, width: int, rotated: int) -> np.ndarray:
    """Where in ours the entries of theirs are; see `Row.pairs`."""
    block = np.arange(width)
    block[width - rotated :] = width - rotated + np.arange(rotated).reshape(2, -1).T.reshape(-1)
    return np.arange(length).reshape(-1, width)[:, block].reshape(-1)


@dataclass(frozen=True)
class Zeros:
    """Their tensor that our model lacks because it is all zeros, such as a bias with use_bias false."""

    theirs: str
    shape: tuple[int, ...]
    is_stacked: bool = True


Table = Sequence[Row | Zeros]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One of their tensors: its name, shape, rows of the table (none: all zeros), and its place in our arrays: layer
    and expert. `sizes` are the lengths of the rows' parts in a group; `also` is another name in some files."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[Row, ...]
    sizes: tuple[int, ...] = ()
    index: tuple[int, ...] = ()
    also: str | None = None

    @property
    def is_vocab(self) -> bool:
        return any(row.vocab for row in self.rows)

    @property
    def is_exact(self) -> bool:
        return any(row.exact for row in self.rows)

    def part_of(self, number: int, array: Any) -> Any:
        """The tensor of a row alone, of their tensor as an array of numpy or JAX."""
        first = self.rows[0]
        return array if len(self.rows) == 1 else cut_rows(array, self.sizes, first.groups, number, first.axis)


def build_pieces(table: Table, shapes: Mapping[str, Sequence[int]], num_layers: int, vocab_size: int) -> list[Piece]:
    """All of their tensors for parameters of these shapes (by path), grouped by layer.

    Raises ValueError for a parameter without a row, or a row without a parameter.
    """
    rows, parameters = {row.ours for row in table if isinstance(row, Row)}, set(shapes)
    if rows != parameters:
        missing, unexpected = sorted(rows - parameters)[:5], sorted(parameters - rows)[:5]
        raise ValueError(f"parameters do not match the table: missing {missing}, unexpected {unexpected}")

    def pieces(entry: Zeros | tuple[Row, ...], layer: int | None) -> Iterator[Piece]:
        if isinstance(entry, Zeros):
            index = () if layer is None else (layer,)
            yield Piece(name=entry.theirs.format(layer=layer), shape=entry.shape, rows=(), sizes=(), index=index)
            return
        first = entry[0]
        place = first.layers.index(layer) if first.layers is not None and layer is not None else layer
        index = () if place is None else (place,)
        theirs = [row.their_shape(shapes[row.ours][row.stacked_dims :], vocab_size) for row in entry]
        axis = first.axis
        sizes = tuple(sum(shape[axis : axis + 1]) // row.groups for shape, row in zip(theirs, entry, strict=True))
        shape = theirs[0]
        if len(entry) > 1:
            shape = (*shape[:axis], sum(sizes) * first.groups, *shape[axis + 1 :])
        experts = [None] if first.stacked_dims < 2 else range(shapes[first.ours][1])
        for expert in experts:
            name = first.theirs.format(layer=layer, expert=expert)
            at = index if expert is None else (*index, expert)
            also = None if first.also is None else first.also.format(layer=layer, expert=expert)
            yield Piece(name=name, shape=shape, rows=entry, sizes=sizes, index=at, also=also)

    entries = list(joined_rows(table))
    stacked = [entry for entry in entries if _is_stacked(entry)]
    ends = [row.layers[-1] + 1 for row in table if isinstance(row, Row) and row.layers]
    return [
        *(piece for entry in entries if not _is_stacked(entry) for piece in pieces(entry, None)),
        *(
            piece
            for layer in range(max(num_layers, *ends, 0))
            for entry in stacked
            if (layer < num_layers if isinstance(entry, Zeros) else _is_in(entry[0], layer, num_layers))
            for piece in pieces(entry, layer)
        ),
    ]


def joined_rows(table: Table) -> Iterator[Zeros | tuple[Row, ...]]:
    """The entries of a table, rows of one tensor together."""
    for _, entries in itertools.groupby(table, lambda entry: (entry.theirs, getattr(entry, "named_in", None))):
        first, *others = entries
        yield first if isinstance(first, Zeros) else (first, *(row for row in others if isinstance(row, Row)))


def cut_rows(array: Any, sizes: Sequence[int], groups: int, number: int, axis: int = 0) -> Any:
    """The part of joined rows with this number: `sizes` are the lengths of the parts in each group."""
    before, after, first = array.shape[:axis], array.shape[axis + 1 :], sum(sizes[:number])
    grouped = array.reshape(*before, groups, -1, *after)
    part = grouped[(*(slice(None) for _ in before), slice(None), slice(first, first + sizes[number]))]
    return part.reshape(*before, groups * sizes[number], *after)


def _is_stacked(entry: Zeros | tuple[Row, ...]) -> bool:
    return entry.is_stacked if isinstance(entry, Zeros) else entry[0].is_stacked


def _is_in(row: Row, layer: int, num_layers: int) -> bool:
    is_block = layer < num_layers if row.layers is None else layer in row.layers
    return is_block and (row.named_in is None or layer in row.named_in)


def take(piece: Piece, get: Callable[[str, tuple[int, ...]], np.ndarray], vocab_size: int) -> np.ndarray:
    """Values of one of their tensors. `get(path, index)` returns our array at this index of its first dimensions."""
    if not piece.rows:
        return np.zeros(piece.shape, np.float32)
    parts = [row.to_theirs(get(row.ours, piece.index), vocab_size) for row in piece.rows]
    if len(parts) == 1:
        return parts[0]
    groups, axis = piece.rows[0].groups, piece.rows[0].axis
    grouped = [part.reshape(*part.shape[:axis], groups, -1, *part.shape[axis + 1 :]) for part in parts]
    return np.concatenate(grouped, axis=axis + 1).reshape(piece.shape)


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
