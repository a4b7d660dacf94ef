"""The order of training: which window of tokens each row of each batch is.

Window i of a split is tokens [iL, (i+1)L) of its documents' concatenation, L being the sequence length. A window has
L - 1 targets: position p is asked for the token at p + 1.
"""

import numpy as np

from lmtrain.data.permutation import permute


def num_train_windows(tokens: int, seq_len: int) -> int:
    """Whole windows only; the tail of fewer than L tokens is dropped (and counted by the caller's message)."""
    return tokens // seq_len


def num_eval_windows(tokens: int, seq_len: int) -> int:
    """All windows that have at least one target; the tail is padded and masked."""
    whole, tail = divmod(tokens, seq_len)
    return whole + (tail >= 2)


def train_window(
    step: int, rows: np.ndarray, batch_size: int, num_windows: int, shuffle_seed: int | None = None
) -> np.ndarray:
    """The windows of the given rows of the batch at `step`, int64 [rows]: a pure function of its arguments.

    The data is read over and over: in source order, or with a `shuffle_seed` in another order each epoch.
    """
    epoch, index = np.divmod(np.int64(step) * batch_size + rows, num_windows)
    return index if shuffle_seed is None else permute(index, num_windows, shuffle_seed, epoch)
