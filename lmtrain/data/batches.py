"""Batches as numpy arrays: one item of a Grain source is this process's part of one global batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import grain
import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.data.manifest import Manifest
from lmtrain.data.mixture import Mixture
from lmtrain.data.token_store import TokenStore
from lmtrain.data.windows import Shuffle, num_eval_windows, num_train_windows, train_windows


class Batch(TypedDict):
    """`tokens` int32 [rows, L]; `loss_mask` bool [rows, L], true where the next token is a target."""

    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class TrainSource:
    """Item t is the batch of step t: random access, so resuming is asking for the next step.

    With a `mixture` it says which of the `stores` each example is from; without, there is one store.
    """

    stores: Sequence[TokenStore]
    mixture: Mixture | None
    seq_len: int
    batch_size: int
    rows: np.ndarray
    num_steps: int
    shuffle: Shuffle
    seed: int

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> Batch:
        examples = np.int64(step) * self.batch_size + self.rows
        if self.mixture is None:
            tokens = self._read(0, examples)
        else:
            sources, numbers = self.mixture.source_of(examples)
            tokens = np.empty((len(examples), self.seq_len), np.int32)
            for source in np.unique(sources).tolist():
                tokens[sources == source] = self._read(source, numbers[sources == source])
        mask = np.broadcast_to(np.arange(self.seq_len) < self.seq_len - 1, tokens.shape)
        return Batch(tokens=tokens, loss_mask=mask.copy())

    def _read(self, source: int, examples: np.ndarray) -> np.ndarray:
        store = self.stores[source]
        windows = num_train_windows(store.tokens, self.seq_len)
        # sources of equal size must not be shuffled alike
        chosen = train_windows(examples, windows, self.shuffle, self.seed + source * 2**32)
        return store.read(chosen * self.seq_len, self.seq_len)


@dataclass(frozen=True)
class EvalSource:
    """Item i is batch i of the whole split, in order; rows past the end count nothing."""

    store: TokenStore
    seq_len: int
    batch_size: int
    rows: np.ndarray
    max_batches: int | None

    def __len__(self) -> int:
        whole = -(-num_eval_windows(self.store.tokens, self.seq_len) // self.batch_size)
        return whole if self.max_batches is None else min(whole, self.max_batches)

    def __getitem__(self, index: int) -> Batch:
        starts = (np.int64(index) * self.batch_size + self.rows) * self.seq_len
        tokens = self.store.read(starts, self.seq_len)
        positions = np.arange(self.seq_len)
        mask = (positions < self.seq_len - 1) & (starts[:, None] + positions + 1 < self.store.tokens)
        return Batch(tokens=tokens, loss_mask=mask)


def open_store(folder: str, manifest: Manifest, seq_len: int) -> TokenStore:
    """The tokens of a finished split; raises `UserError` if files are missing or there is not one whole window."""
    store = TokenStore(folder, manifest)
    store.check_files()
    if store.tokens < seq_len:
        raise UserError(f"{folder}: {store.tokens:,} tokens are less than one sequence of {seq_len:,} (model.seq_len)")
    return store


def iterate(source: TrainSource | EvalSource, start: int, prefetch: int) -> grain.DatasetIterator[Batch]:
    """Items `start`, `start + 1`, ... read ahead by `prefetch` in one background thread.

    One thread: a store's readers are not shared between threads, and one reads far faster than a step computes.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.source(source)[start:].to_iter_dataset(options))
