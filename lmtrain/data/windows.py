"""Order of training: the window of tokens of each example; documents packed into windows; pairs of answers.

Window i of a split of text is tokens [iL, (i+1)L) of its concatenated documents, where L is the sequence length. A
window has L - 1 targets: position p predicts the token at p + 1. For evaluation the last token of each window is also
the first of the next one, so that every token but the first one of the split is a target once. Conversations and
completions are packed instead, see `lmtrain/data/windows.py`.
"""

import functools
from typing import NamedTuple

import numpy as np

from lmtrain.data.formats import TooLong
from lmtrain.data.mixture import permute
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
    windows = []  # start, length and first document of each
    document, following = 0, 0  # `following` indexes the first long document that is not packed yet
    while document < len(lengths):
        if is_long[document]:
            following += 1
            if too_long == "cut":
                windows.append((begins[document], seq_len, document))
            document += 1
            continue
        fit = int(np.searchsorted(ends, begins[document] + seq_len, side="right"))
        if following < len(long_documents):
            fit = min(fit, int(long_documents[following]))
        size = ends[fit - 1] - begins[document]
        if size:
            windows.append((begins[document], size, document))
        document = fit
    starts, sizes, first = np.array(windows, np.int64).reshape(-1, 3).T.copy()
    return Packed(starts, sizes, first, len(long_documents))


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
        return read_columns(self.store, self._starts[numbers], columns)

    def _document_starts(self, numbers: np.ndarray, begins: np.ndarray, first: int) -> np.ndarray:
        return document_starts(self.store, self._starts[numbers], begins, first)

    def _pack(self, shard: int) -> Packed:
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


# Windows of pairs of answers: complete pairs, each as two documents, first the chosen answer, then the rejected one.
#
# So the documents of even numbers in a window are chosen, those of odd numbers rejected.


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


Shuffle = bool | int

# Examples whose order is computed and cached together.
_BLOCK = 8192


class WindowOrder:
    """`train_windows` of a source with a cache, for callers that request few examples at a time.

    A shuffle costs the same for one example as for thousands, so it is computed for a block of consecutive ones.
    """

    def __init__(self, shuffle: Shuffle, seed: int):
        self._shuffle = shuffle
        self._seed = seed
        self._block = functools.lru_cache(8)(self._compute)

    def __call__(self, examples: np.ndarray, num_windows: int) -> np.ndarray:
        if self._shuffle is False:
            return train_windows(examples, num_windows)
        blocks = examples // _BLOCK
        windows = np.empty_like(examples)
        for block in np.unique(blocks).tolist():
            chosen = blocks == block
            windows[chosen] = self._block(block, num_windows)[examples[chosen] - block * _BLOCK]
        return windows

    def _compute(self, number: int, num_windows: int) -> np.ndarray:
        examples = np.arange(number * _BLOCK, (number + 1) * _BLOCK)
        return train_windows(examples, num_windows, self._shuffle, self._seed)


class TextWindows:
    """Windows of text: L tokens each, in the order of the documents. `overlap` is the number of tokens that a window
    shares with the next one."""

    def __init__(self, store: TokenStore, seq_len: int, overlap: int = 0):
        self.store = store
        self._seq_len = seq_len
        self._stride = seq_len - overlap

    def for_training(self) -> int:
        """Number of complete windows so far; training drops the tail of fewer than L tokens."""
        return self.store.shards.tokens // self._seq_len

    def for_evaluation(self) -> int:
        """Number of windows with at least one target; the tail is padded and masked."""
        return max(0, -(-(self.store.shards.tokens - 1) // self._stride))

    def wait_for(self, number: int | None) -> int:
        """Wait until `number` windows are known, or all (None); return the number of known windows."""
        return self.store.shards.wait_for(None if number is None else number * self._seq_len) // self._seq_len

    def read(self, numbers: np.ndarray, columns: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens int32, starts of documents int32 (see `document_starts`), and loss mask bool of windows.

        Each has the given columns of the windows' positions, [windows, columns]. Every token is a target, also the
        first one of a document.
        """
        starts = numbers * self._stride
        tokens, begins, _ = read_columns(self.store, starts, columns)
        positions = np.arange(columns.start, columns.stop)
        mask = (positions < self._seq_len - 1) & (starts[:, None] + positions + 1 < self.store.shards.tokens)
        return tokens, document_starts(self.store, starts, begins, columns.start), mask


# What the examples of a source are.
Windows = TextWindows | PackedWindows


def windows_of(store: TokenStore, seq_len: int, evaluates: bool = False) -> Windows:
    """The windows of a store in sequences of `seq_len` tokens, for training or for evaluation."""
    return packed_windows_of(store, seq_len) if store.has_targets else TextWindows(store, seq_len, int(evaluates))


def wait_for_windows(windows: Windows, examples: np.ndarray, shuffle: Shuffle) -> int:
    """Wait until more data would not change the windows of `examples`; return the number of windows.

    Source order requires the data up to the examples, a shuffle within blocks the entire block, a full shuffle all
    data.
    """
    if windows.store.shards.complete or shuffle is True:
        return windows.wait_for(None)
    block = 1 if shuffle is False else shuffle
    needed = -(-(int(examples.max()) + 1) // block) * block
    return min(needed, windows.wait_for(needed))


def train_windows(examples: np.ndarray, num_windows: int, shuffle: Shuffle = False, seed: int = 0) -> np.ndarray:
    """Windows of the given examples of a source, int64 [rows]: a pure function of its arguments.

    The data repeats every epoch. `shuffle` false reads in source order, true in a new order each epoch, and a number N
    shuffles within blocks of N windows: windows stay near their place, and the first block can be read before the rest
    of the data is available.
    """
    epoch, index = np.divmod(examples, num_windows)
    if shuffle is False:
        return index
    if shuffle is True or shuffle >= num_windows:
        return permute(index, num_windows, seed, epoch)
    blocks = -(-num_windows // shuffle)
    block, offset = np.divmod(index, shuffle)
    key = epoch * blocks + block
    last = block == blocks - 1  # may be shorter
    moved = np.empty_like(index)
    moved[~last] = permute(offset[~last], shuffle, seed, key[~last])
    moved[last] = permute(offset[last], num_windows - (blocks - 1) * shuffle, seed, key[last])
    return block * shuffle + moved
