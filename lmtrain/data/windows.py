"""Order of training: the window of tokens of each example.

Window i of a split of text is tokens [iL, (i+1)L) of its concatenated documents, where L is the sequence length. A
window has L - 1 targets: position p predicts the token at p + 1. For evaluation the last token of each window is also
the first of the next one, so that every token but the first one of the split is a target once. Conversations and
completions are packed instead, see `lmtrain/data/packing.py`.
"""

import functools

import numpy as np

from lmtrain.data.packing import PackedWindows
from lmtrain.data.pairs import packed_windows_of
from lmtrain.data.permutation import permute
from lmtrain.data.token_store import TokenStore, document_starts, read_columns

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
