"""Windows of pairs of answers: complete pairs, each as two documents, first the chosen answer, then the rejected one.

So the documents of even numbers in a window are chosen, those of odd numbers rejected.
"""

import numpy as np

from lmtrain.data.packing import Packed, PackedWindows, pack
from lmtrain.data.token_store import TokenStore, read_columns


def kept_lengths(chosen: np.ndarray, rejected: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens of each answer are kept of a pair, so that both fit: the longer one is cut off to half of the
    window at least."""
    of_chosen = np.minimum(chosen, np.maximum(seq_len - seq_len // 2, seq_len - rejected))
    return of_chosen, np.minimum(rejected, seq_len - of_chosen)


class PairWindows(PackedWindows):
    """Windows of a store of pairs. A pair that is too long has a window of its own, with the start of each answer."""

    def __init__(self, store: TokenStore, seq_len: int):
        super().__init__(store, seq_len)
        self._first = np.zeros(0, np.int64)  # document of each window
        self._begins = np.zeros(0, np.int64)  # of each document, in tokens of the store
        self._sizes = np.zeros(0, np.int64)

    @property
    def documents(self) -> int:
        """Number of documents so far, twice that of pairs."""
        return len(self._sizes)

    def numbers_of_documents(self, numbers: np.ndarray, columns: range) -> np.ndarray:
        """The number of each token's document in its window, int32 [windows, columns]; padding is one more document."""
        positions = np.arange(columns.start, columns.stop)
        found = np.zeros((len(numbers), len(columns)), np.int32)
        for row, starts in enumerate(map(self._starts_in, numbers.tolist())):
            found[row] = np.searchsorted(starts, positions, side="right") - 1
        return found

    def values_at_starts(self, numbers: np.ndarray, columns: range, values: np.ndarray) -> np.ndarray:
        """Values of documents at their first tokens, 0 elsewhere, float32 [windows, columns]. `values`: [documents]."""
        placed = np.zeros((len(numbers), len(columns)), np.float32)
        for row, window in enumerate(numbers.tolist()):
            starts = self._starts_in(window)[:-1]
            inside = (starts >= columns.start) & (starts < columns.stop)
            of_window = values[self.range_of(window)]
            placed[row, starts[inside] - columns.start] = of_window[inside]
        return placed

    def range_of(self, window: int) -> slice:
        """The documents of a window; none past the last one."""
        if window >= len(self._starts):
            return slice(0, 0)
        first, size = int(self._first[window]), int(self._lengths[window])
        if self._sizes[first : first + 2].sum() > self._seq_len:
            return slice(first, first + 2)
        end = int(self._starts[window]) + size
        return slice(first, int(np.searchsorted(self._begins, end)))

    def _starts_in(self, window: int) -> np.ndarray:
        """Where each document of a window starts in it, and where its padding starts."""
        documents = self.range_of(window)
        if documents.start == documents.stop:
            return np.zeros(1, np.int64)
        cut = self._cut(documents.start)
        if cut is not None:
            return np.array([0, cut, self._lengths[window]])
        return np.append(self._begins[documents] - self._starts[window], self._lengths[window])

    def _cut(self, first: int) -> int | None:
        """The number of tokens that are kept of the chosen answer, document `first`; None: the pair is complete."""
        chosen, rejected = self._sizes[first : first + 2]
        if chosen + rejected <= self._seq_len:
            return None
        return int(kept_lengths(chosen, rejected, self._seq_len)[0])

    def _read_tokens(self, numbers: np.ndarray, columns: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = read_columns(self.store, self._starts[numbers], columns)
        cuts = {row: cut for row, first in enumerate(self._first[numbers]) if (cut := self._cut(first)) is not None}
        if cuts:
            rows = np.array(list(cuts))
            # the rejected answer is read as if the rest of the chosen one were not there
            skipped = self._sizes[self._first[numbers[rows]]] - np.array(list(cuts.values()))
            after = np.arange(columns.start, columns.stop) >= np.array(list(cuts.values()))[:, None]
            moved = read_columns(self.store, self._starts[numbers[rows]] + skipped, columns)
            for array, other in zip(found, moved, strict=True):
                array[rows] = np.where(after, other, array[rows])
        return found

    def _document_starts(self, numbers: np.ndarray, begins: np.ndarray, first: int) -> np.ndarray:
        columns = range(first, first + begins.shape[1])
        of_documents = self.numbers_of_documents(numbers, columns)
        starts = np.zeros(begins.shape, np.int32)
        for row, window in enumerate(numbers.tolist()):
            starts[row] = self._starts_in(window)[of_documents[row]]
        return starts

    def _pack(self, shard: int) -> Packed:
        lengths = self.store.document_lengths(shard)
        packed = pack(lengths.reshape(-1, 2).sum(1), self._seq_len, self.store.too_long)
        begins = self.store.shards.starts[shard] + np.cumsum(lengths) - lengths
        self._first = np.append(self._first, len(self._sizes) + 2 * packed.first)
        self._begins, self._sizes = np.append(self._begins, begins), np.append(self._sizes, lengths)
        return packed


def packed_windows_of(store: TokenStore, seq_len: int) -> PackedWindows:
    """The windows of a store of documents with targets, which may be pairs."""
    return PairWindows(store, seq_len) if store.has_pairs else PackedWindows(store, seq_len)
