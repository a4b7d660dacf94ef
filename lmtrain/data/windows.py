"""Order of training: the window of tokens of each example, of text, of packed documents, and of pairs of answers.

Window i of a split of text is tokens [iL, (i+1)L) of its concatenated documents, where L is the sequence length. A
window has L - 1 targets: position p predicts the token at p + 1. For evaluation the last token of each window is also
the first of the next one, so that every token but the first one of the split is a target once. Conversations and
completions are packed instead, see `lmtrain/data/packing.py`.
"""

import functools

import numpy as np

from lmtrain.data.mixture import permute
from lmtrain.data.packing import Pieces, pack, pieces_of
from lmtrain.data.token_store import Span, TokenStore, document_starts, read_columns


class PackedWindows:
    """Windows of a store of documents with targets. Each shard is packed alone, so a growing cache changes nothing.

    Not thread-safe, like the store.
    """

    def __init__(self, store: TokenStore, seq_len: int):
        self.store = store
        self.too_long = 0
        self._seq_len = seq_len
        self._shards = 0
        nothing = np.zeros(0, np.int64)
        self._pieces = Pieces(nothing, nothing, nothing, np.zeros(1, np.int64))

    def for_training(self) -> int:
        self._pack_new()
        return len(self._pieces.offsets) - 1

    for_evaluation = for_training

    @property
    def padding(self) -> float:
        """The share of padding in the windows that are known."""
        room = self.for_training() * self._seq_len
        return 1 - int(self._pieces.lengths.sum()) / room if room else 0.0

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
        lengths = np.array([self._length(number) for number in numbers.tolist()])[:, None]
        # and the next position, whose token is the last column's target
        wider = range(columns.start, columns.stop + 1)
        tokens, begins, targets = self._read_tokens(numbers, wider)
        positions = np.arange(wider.start, wider.stop)
        inside = positions < lengths
        begins |= positions == lengths
        mask = (targets & inside & ~begins)[:, 1:]
        mask &= positions[1:] < self._seq_len
        documents = self._document_starts(numbers, begins[:, :-1], columns.start)
        return tokens[:, :-1], np.where(inside[:, :-1], documents, lengths).astype(np.int32), mask

    def have_target(self, numbers: np.ndarray) -> bool:
        """Whether any of these windows has a target. Takes no memory for padding."""
        return bool(self.read(numbers, range(max(map(self._length, numbers.tolist()))))[2].any())

    def _of(self, window: int) -> slice:
        """The pieces of a window; none past the last one."""
        offsets = self._pieces.offsets
        return slice(*offsets[window : window + 2].tolist()) if window < len(offsets) - 1 else slice(0)

    def _length(self, window: int) -> int:
        return int(self._pieces.lengths[self._of(window)].sum())

    def _read_tokens(self, numbers: np.ndarray, columns: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, first tokens of documents, and targets of windows, [windows, columns]; 0 and false in padding."""
        lead = int(columns.start > 0)  # the store does not know whether a document starts at the first token of a span
        first, end = columns.start - lead, columns.stop
        spans, rows, at = [], [], []
        for row, window in enumerate(numbers.tolist()):
            column = 0
            pieces = self._of(window)
            for start, length in zip(self._pieces.starts[pieces], self._pieces.lengths[pieces], strict=True):
                if first <= column < end:  # every piece begins with a document
                    rows.append(row)
                    at.append(column - first)
                skipped = max(0, first - column)
                count = min(column + int(length), end) - (column + skipped)
                if count > 0:
                    spans.append(Span(row, column + skipped - first, int(start) + skipped, count))
                column += int(length)
        tokens, begins, targets = self.store.read_spans(spans, (len(numbers), end - first))
        begins[rows, at] = True
        return tokens[:, lead:], begins[:, lead:], targets[:, lead:]

    def _document_starts(self, numbers: np.ndarray, begins: np.ndarray, first: int) -> np.ndarray:
        def before(rows: np.ndarray, columns: range) -> np.ndarray:
            return self._read_tokens(numbers[rows], columns)[1]

        return document_starts(before, begins, first)

    def _pack(self, shard: int, lengths: np.ndarray) -> Pieces:
        """The pieces of a shard whose documents have these lengths, relative to its first token."""
        in_pairs = self.store.has_pairs
        of_units = lengths.reshape(-1, 2).sum(1) if in_pairs else lengths
        packed = pack(of_units, self._seq_len, self.store.too_long, self.store.pack)
        self.too_long += packed.too_long
        return pieces_of(packed, lengths, self._seq_len, in_pairs)

    def _pack_new(self) -> None:
        shards = self.store.shards
        parts, count = [self._pieces], len(self._pieces.starts)
        for shard in range(self._shards, len(shards.infos)):
            pieces = self._pack(shard, self.store.document_lengths(shard))
            offsets = pieces.offsets[1:] + count
            parts.append(pieces._replace(starts=pieces.starts + shards.starts[shard], offsets=offsets))
            count += len(pieces.starts)
            self._shards += 1
        if len(parts) > 1:
            self._pieces = Pieces(*map(np.concatenate, zip(*parts, strict=True)))


# Windows of pairs of answers: complete pairs, each as two documents, first the chosen answer, then the rejected one.
#
# So the documents of even numbers in a window are chosen, those of odd numbers rejected.


class PairWindows(PackedWindows):
    """Windows of a store of pairs. A pair that is too long has a window of its own, with the start of each answer."""

    def __init__(self, store: TokenStore, seq_len: int):
        super().__init__(store, seq_len)
        self._begins = np.zeros(0, np.int64)  # of each document, in tokens of the store

    @property
    def documents(self) -> int:
        """Number of documents so far, twice that of pairs."""
        return len(self._begins)

    def numbers_of_documents(self, numbers: np.ndarray, columns: range) -> np.ndarray:
        """The number of each token's document in its window, int32 [windows, columns]; padding is one more document."""
        positions = np.arange(columns.start, columns.stop)
        found = np.zeros((len(numbers), len(columns)), np.int32)
        for row, window in enumerate(numbers.tolist()):
            found[row] = np.searchsorted(self._places(window)[1], positions, side="right") - 1
        return found

    def values_at_starts(self, numbers: np.ndarray, columns: range, values: np.ndarray) -> np.ndarray:
        """Values of documents at their first tokens, 0 elsewhere, float32 [windows, columns]. `values`: [documents]."""
        placed = np.zeros((len(numbers), len(columns)), np.float32)
        for row, window in enumerate(numbers.tolist()):
            documents, starts = self._places(window)
            inside = (starts[:-1] >= columns.start) & (starts[:-1] < columns.stop)
            placed[row, starts[:-1][inside] - columns.start] = values[documents[inside]]
        return placed

    def documents_of(self, window: int) -> np.ndarray:
        """The numbers of the documents of a window, int64; none past the last one."""
        return self._places(window)[0]

    def _places(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of a window; where each starts in it, and last where its padding starts."""
        documents, places, column = [], [], 0
        pieces = self._of(window)
        for start, length, first in zip(*(values[pieces] for values in self._pieces[:3]), strict=True):
            within = np.arange(first, np.searchsorted(self._begins, start + length))
            documents.append(within)
            places.append(self._begins[within] - start + column)
            column += length
        nothing = np.zeros(0, np.int64)
        return np.concatenate([nothing, *documents]), np.concatenate([nothing, *places, [column]])

    def _document_starts(self, numbers: np.ndarray, begins: np.ndarray, first: int) -> np.ndarray:
        of_documents = self.numbers_of_documents(numbers, range(first, first + begins.shape[1]))
        starts = np.zeros(begins.shape, np.int32)
        for row, window in enumerate(numbers.tolist()):
            starts[row] = self._places(window)[1][of_documents[row]]
        return starts

    def _pack(self, shard: int, lengths: np.ndarray) -> Pieces:
        pieces = super()._pack(shard, lengths)
        pieces = pieces._replace(documents=pieces.documents + len(self._begins))
        begins = self.store.shards.starts[shard] + np.cumsum(lengths) - lengths
        self._begins = np.append(self._begins, begins)
        return pieces


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

        def before(rows: np.ndarray, columns: range) -> np.ndarray:
            return read_columns(self.store, starts[rows], columns)[1]

        return tokens, document_starts(before, begins, columns.start), mask


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
