"""Batches as numpy arrays. One item of a Grain source is this process's part of one global batch."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict, cast

import grain
import numpy as np

from lmtrain.data.caches import Cache, open_store
from lmtrain.data.config import BatchSizes, DataConfig
from lmtrain.data.mixture import Mixture
from lmtrain.data.token_store import TokenStore
from lmtrain.data.windows import PairWindows, Shuffle, WindowOrder, Windows, wait_for_windows, windows_of
from lmtrain.runtime.errors import ReadError, UserError

# Batches prefetched: enough to hide a slow read, small compared with the model in memory.
_PREFETCH = 8
# Python's error if a thread cannot be started.
_NO_THREAD = "can't start new thread"


class Batch(TypedDict):
    """One batch: `tokens` int32 [rows, L]; `loss_mask` bool [rows, L], true where the next token is a target.

    `segments` int32 [rows, L] is present with `mask_across_documents`: where in its window the document of each token
    starts; tokens attend only within their segment. `positions` int32 [rows, L] is present if positions restart in any
    source: the position of each token within its segment, or in its sequence where they do not restart. Where other
    processes have a part of every sequence, all arrays have only the columns of this process.

    Of pairs of answers, `documents` int32 [rows, L] is the number of each token's document in its window, even ones
    chosen and odd ones rejected; and `reference` float32 [rows, L] has the log-probability of each answer by the
    reference at its first token, 0 elsewhere, if there is a reference.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    segments: NotRequired[np.ndarray]
    positions: NotRequired[np.ndarray]
    loss_weights: NotRequired[np.ndarray]
    documents: NotRequired[np.ndarray]
    reference: NotRequired[np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TrainSource:
    """Training batches by step: item t is the batch of step t. Access is random, so a resume just reads the next step.

    `mixture` selects the store of each example; None means that there is one store. `rows` are the rows of this
    process, by batch size, and `columns` its positions of every sequence, None if these are all. `reset_positions`
    None: positions restart in stores with targets only. `loss_weights` are the weights of the tokens of each store;
    None leaves the array out. `references` are those of the documents of each store, float32 [documents].
    """

    stores: Sequence[TokenStore]
    mixture: Mixture | None
    seq_len: int
    batch_sizes: BatchSizes
    rows: Mapping[int, np.ndarray]
    num_steps: int
    shuffle: Shuffle
    seed: int
    mask_across_documents: bool
    reset_positions: bool | None = False
    loss_weights: Sequence[float] | None = None
    columns: range | None = None
    references: Sequence[np.ndarray] | None = None

    @functools.cached_property
    def orders(self) -> list[WindowOrder]:
        # sources of equal size must not get the same order
        return [WindowOrder(self.shuffle, self.seed + number * 2**32) for number in range(len(self.stores))]

    @functools.cached_property
    def windows(self) -> list[Windows]:
        return [windows_of(store, self.seq_len) for store in self.stores]

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> Batch:
        examples = np.int64(self.batch_sizes.before(step)) + self.rows[self.batch_sizes.at(step)]
        sources, numbers = np.zeros_like(examples), examples
        if self.mixture is not None:
            sources, numbers = self.mixture.source_of(examples)
        columns = self.columns or range(self.seq_len)
        tokens = np.empty((len(examples), len(columns)), np.int32)
        documents, mask = np.empty(tokens.shape, np.int32), np.empty(tokens.shape, bool)
        of_pairs: dict[str, np.ndarray] = {}
        for source in np.unique(sources).tolist():
            chosen = sources == source
            windows = self._windows_of(source, numbers[chosen])
            tokens[chosen], documents[chosen], mask[chosen] = self.windows[source].read(windows, columns)
            reference = None if self.references is None else self.references[source]
            for name, values in describe_pairs(self.windows[source], windows, columns, reference).items():
                of_pairs.setdefault(name, np.zeros(tokens.shape, values.dtype))[chosen] = values
        restarts = np.array([restart(store, self.reset_positions) for store in self.stores])
        batch = make_batch(
            tokens, mask, documents, columns, self.mask_across_documents, restarts[sources] if restarts.any() else None
        )
        if self.loss_weights is not None:
            weights = np.array(self.loss_weights, np.float32)[sources]
            batch["loss_weights"] = np.repeat(weights[:, None], len(columns), axis=1)
        return cast(Batch, {**batch, **of_pairs})

    def _windows_of(self, source: int, examples: np.ndarray) -> np.ndarray:
        windows = self.windows[source]
        count = wait_for_windows(windows, examples, self.shuffle)
        if count == 0:
            raise too_little(windows.store, self.seq_len)
        return self.orders[source](examples, count)


@dataclass(frozen=True, kw_only=True)
class EvalSource:
    """Evaluation batches in order: item i is batch i of the split. Rows past the end are masked."""

    store: TokenStore
    seq_len: int
    batch_size: int
    rows: np.ndarray
    max_batches: int | None
    mask_across_documents: bool
    reset_positions: bool | None = False
    columns: range | None = None
    reference: np.ndarray | None = None

    @property
    def stores(self) -> Sequence[TokenStore]:
        return [self.store]

    @functools.cached_property
    def windows(self) -> Windows:
        return windows_of(self.store, self.seq_len, evaluates=True)

    @property
    def all_batches(self) -> int:
        return -(-self.windows.for_evaluation() // self.batch_size)

    def __len__(self) -> int:
        return self.all_batches if self.max_batches is None else min(self.all_batches, self.max_batches)

    def __getitem__(self, index: int) -> Batch:
        numbers = np.int64(index) * self.batch_size + self.rows
        columns = self.columns or range(self.seq_len)
        tokens, documents, mask = self.windows.read(numbers, columns)
        restarts = np.full(len(numbers), restart(self.store, self.reset_positions))
        batch = make_batch(
            tokens, mask, documents, columns, self.mask_across_documents, restarts if restarts.any() else None
        )
        return cast(Batch, {**batch, **describe_pairs(self.windows, numbers, columns, self.reference)})


def restart(store: TokenStore, reset_positions: bool | None) -> bool:
    """Whether position ids restart at each document of a store; None is the default of `data.reset_positions`."""
    return store.has_targets if reset_positions is None else reset_positions


def describe_pairs(
    windows: Windows, numbers: np.ndarray, columns: range, reference: np.ndarray | None
) -> dict[str, np.ndarray]:
    """The arrays of a batch that only pairs of answers have."""
    if not isinstance(windows, PairWindows):
        return {}
    arrays = {"documents": windows.numbers_of_documents(numbers, columns)}
    if reference is not None:
        arrays["reference"] = windows.values_at_starts(numbers, columns, reference)
    return arrays


def make_batch(
    tokens: np.ndarray,
    loss_mask: np.ndarray,
    documents: np.ndarray,
    columns: range,
    with_segments: bool,
    restarts: np.ndarray | None,
) -> Batch:
    """Assemble a batch. `documents` int32 [rows, columns]: where in its window the document of each token starts.

    `restarts` bool [rows]: in which rows positions restart there; None leaves positions out.
    """
    batch = Batch(tokens=tokens, loss_mask=loss_mask)
    if with_segments:
        batch["segments"] = documents
    if restarts is not None:
        positions = np.arange(columns.start, columns.stop, dtype=np.int32)
        batch["positions"] = positions - np.where(restarts[:, None], documents, 0)
    return batch


def open_cache(config: DataConfig, cache: Cache, seq_len: int) -> TokenStore:
    """Open the tokens of a cache. Raises `UserError` if a complete cache is shorter than one sequence."""
    store = open_store(config, cache)
    if store.shards.complete and store.shards.tokens < (1 if store.has_targets else seq_len):
        raise too_little(store, seq_len)
    return store


def too_little(store: TokenStore, seq_len: int) -> UserError:
    """The error for data that is shorter than one sequence."""
    tokens = store.shards.tokens
    return UserError(f"{store.name}: {tokens:,} tokens are less than one sequence of {seq_len:,} (model.seq_len)")


def iterate(source: TrainSource | EvalSource, start: int = 0) -> Iterator[Mapping[str, np.ndarray]]:
    """Iterate over items `start`, `start + 1`, ..., prefetched in one background thread.

    One thread, since a store's readers are not thread-safe and one thread reads far faster than a step computes.
    Raises `ReadError` if the thread cannot be started, or runs out of memory, or the machine cannot read a file.
    """
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_PREFETCH)
    try:
        yield from grain.MapDataset.source(source)[start:].to_iter_dataset(options)
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != _NO_THREAD:
            raise
        names = ", ".join(store.name for store in source.stores)
        raise ReadError(f"reading {names} failed: {type(error).__name__}: {str(error) or 'out of memory'}") from error
