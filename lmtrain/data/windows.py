"""The order of training: which window of tokens each example is.

Window i of a split is tokens [iL, (i+1)L) of its documents' concatenation, L being the sequence length. A window has
L - 1 targets: position p is asked for the token at p + 1.
"""

import functools

import numpy as np

from lmtrain.data.permutation import permute
from lmtrain.data.shards import Shards

Shuffle = bool | int

_STRETCH = 8192


def num_train_windows(tokens: int, seq_len: int) -> int:
    """Whole windows only; the tail of fewer than L tokens is dropped (and counted by the caller's message)."""
    return tokens // seq_len


def num_eval_windows(tokens: int, seq_len: int) -> int:
    """All windows that have at least one target; the tail is padded and masked."""
    whole, tail = divmod(tokens, seq_len)
    return whole + (tail >= 2)


class WindowOrder:
    """`train_windows` of a source, for callers that ask for few examples at a time.

    The arithmetic of a shuffle costs the same for one example as for thousands, so it is done for a stretch of
    consecutive ones and remembered.
    """

    def __init__(self, shuffle: Shuffle, seed: int):
        self._shuffle = shuffle
        self._seed = seed
        self._stretch = functools.lru_cache(8)(self._compute)

    def __call__(self, examples: np.ndarray, num_windows: int) -> np.ndarray:
        if self._shuffle is False:
            return train_windows(examples, num_windows)
        numbers = examples // _STRETCH
        found = np.empty_like(examples)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            found[chosen] = self._stretch(number, num_windows)[examples[chosen] - number * _STRETCH]
        return found

    def _compute(self, number: int, num_windows: int) -> np.ndarray:
        examples = np.arange(number * _STRETCH, (number + 1) * _STRETCH)
        return train_windows(examples, num_windows, self._shuffle, self._seed)


def wait_for_windows(shards: Shards, examples: np.ndarray, seq_len: int, shuffle: Shuffle) -> int:
    """How many windows there are, once there are enough that more would not change which ones `examples` are.

    Source order needs what lies before, a shuffle within stretches the rest of the stretch, a full shuffle everything.
    """
    if shards.complete or shuffle is True:
        return num_train_windows(shards.wait_for(None), seq_len)
    stretch = 1 if shuffle is False else shuffle
    needed = -(-(int(examples.max()) + 1) // stretch) * stretch
    return min(needed, num_train_windows(shards.wait_for(needed * seq_len), seq_len))


def train_windows(examples: np.ndarray, num_windows: int, shuffle: Shuffle = False, seed: int = 0) -> np.ndarray:
    """The windows of examples 0, 1, 2, ... of a source, int64 [rows]: a pure function of its arguments.

    The data is read over and over. `shuffle` false reads in source order, true in another order each epoch, and a
    number shuffles within stretches of so many windows: windows stay near their place, and the first stretch can be
    read before the rest of the data is there.
    """
    epoch, index = np.divmod(examples, num_windows)
    if shuffle is False:
        return index
    if shuffle is True or shuffle >= num_windows:
        return permute(index, num_windows, seed, epoch)
    stretches = -(-num_windows // shuffle)
    stretch, place = np.divmod(index, shuffle)
    key = epoch * stretches + stretch
    last = stretch == stretches - 1  # and may be shorter
    moved = np.empty_like(index)
    moved[~last] = permute(place[~last], shuffle, seed, key[~last])
    moved[last] = permute(place[last], num_windows - (stretches - 1) * shuffle, seed, key[last])
    return stretch * shuffle + moved
