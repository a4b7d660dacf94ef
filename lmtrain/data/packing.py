"""Packing of conversations and completions into windows, none of which splits one."""

from typing import NamedTuple

import numpy as np

from lmtrain.data.formats import TooLong
from lmtrain.data.token_store import TokenStore, document_starts, read_columns


class Packed(NamedTuple):
    """Windows of documents: where each starts and its length, in tokens; the number of its first document; int64
    [windows]. `too_long` is the number of documents that are longer than a window."""

    starts: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    too_long: int


def pack(lengths: np.ndarray, seq_len: int, too_long: TooLong) -> Packed:
    """Next-fit packing of documents in their order: a window takes documents as long as they fit.

    A document longer than `seq_len` has a window of its own, cut off, or none if it is dropped. `lengths` [documents]
    are in tokens. The windows depend on the arguments only.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    is_long = lengths > seq_len
    long_documents = np.flatnonzero(is_long)
    starts, sizes, first = [], [], []
    document, following = 0, 0  # `following` indexes the first long document that is not packed yet
    while document < len(lengths):
        if is_long[document]:
            following += 1
            if too_long == "cut":
                starts.append(begins[document])
                sizes.append(seq_len)
                first.append(document)
            document += 1
            continue
        fit = int(np.searchsorted(ends, begins[document] + seq_len, side="right"))
        if following < len(long_documents):
            fit = min(fit, int(long_documents[following]))
        size = ends[fit - 1] - begins[document]
        if size:
            starts.append(begins[document])
            sizes.append(size)
            first.append(document)
        document = fit
    as_arrays = [np.array(values, np.int64) for values in (starts, sizes, first)]
    return Packed(as_arrays[0], as_arrays[1], as_arrays[2], len(long_documents))


class PackedWindows:
    """Windows of a store of documents with targets. Each shard is packed alone, so a growing cache changes nothing.

    Not thread-safe, like the store.
    """

    def __init__(self, store: TokenStore, seq_len: int):
        self.store = store
        self.too_long = 0
        self._seq_len = seq_len
        self._shards = 0
        self._starts = np.zeros(0, np.int64)
        self._lengths = np.zeros(0, np.int64)

    def for_training(self) -> int:
        """Number of windows so far."""
        self._pack_new()
        return len(self._starts)

    for_evaluation = for_training

    def wait_for(self, number: int | None) -> int:
        """Wait until `number` windows are known, or all (None); return the number of known windows."""
        shards = self.store.shards
        while True:
            was_complete = shards.complete  # before packing, since the last shard may be added in between
            known = self.for_training()
            if was_complete or (number is not None and known >= number):
                return known
            shards.wait_for(None if number is None else int(shards.starts[self._shards]) + 1)

    def read(self, numbers: np.ndarray, columns: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, starts of documents, and loss mask of windows; see `TextWindows.read`.

        A position's target is the next token, if it is one of the same document. Padding is one more document; numbers
        past the last window give padding.
        """
        known = numbers < len(self._starts)
        numbers = np.where(known, numbers, 0)
        lengths = np.where(known, self._lengths[numbers], 0)[:, None]
        # and the next position, whose token is the last column's target
        wider = range(columns.start, columns.stop + 1)
        tokens, begins, targets = self._read_tokens(numbers, wider)
        positions = np.arange(wider.start, wider.stop)
        inside = positions < lengths
        tokens[~inside] = 0
        begins &= inside
        begins |= positions == lengths
        mask = (targets & inside & ~begins)[:, 1:]
        mask &= positions[1:] < self._seq_len
        documents = self._document_starts(numbers, begins[:, :-1], columns.start)
        return tokens[:, :-1], np.where(inside[:, :-1], documents, lengths).astype(np.int32), mask

    def have_target(self, numbers: np.ndarray) -> bool:
        """Whether any of these windows has a target. Takes no memory for padding."""
        return bool(self.read(numbers, range(int(self._lengths[numbers].max())))[2].any())

    def _read_tokens(self, numbers: np.ndarray, columns: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`read_columns` of windows."""
        return read_columns(self.store, self._starts[numbers], columns)

    def _document_starts(self, numbers: np.ndarray, begins: np.ndarray, first: int) -> np.ndarray:
        """`document_starts` of windows."""
        return document_starts(self.store, self._starts[numbers], begins, first)

    def _pack(self, shard: int) -> Packed:
        """The windows of a shard."""
        return pack(self.store.document_lengths(shard), self._seq_len, self.store.too_long)

    def _pack_new(self) -> None:
        shards = self.store.shards
        starts, lengths = [self._starts], [self._lengths]
        for shard in range(self._shards, len(shards.infos)):
            packed = self._pack(shard)
            starts.append(packed.starts + shards.starts[shard])
            lengths.append(packed.lengths)
            self.too_long += packed.too_long
            self._shards += 1
        if len(starts) > 1:
            self._starts, self._lengths = np.concatenate(starts), np.concatenate(lengths)
