"""Packing of conversations and completions into windows, none of which splits one."""

import numpy as np

from lmtrain.data.formats import TooLong
from lmtrain.data.token_store import TokenStore, document_starts, read_columns


def pack(lengths: np.ndarray, seq_len: int, too_long: TooLong) -> tuple[np.ndarray, np.ndarray, int]:
    """Next-fit packing of documents in their order: a window takes documents as long as they fit.

    A document longer than `seq_len` has a window of its own, cut off, or none if it is dropped. `lengths` [documents]
    are in tokens. The windows depend on the arguments only. Returns where each starts and its length, in tokens,
    int64 [windows]; and the number of documents that are longer than a window.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    is_long = lengths > seq_len
    long_documents = np.flatnonzero(is_long)
    starts, sizes = [], []
    document, following = 0, 0  # `following` indexes the first long document that is not packed yet
    while document < len(lengths):
        if is_long[document]:
            following += 1
            if too_long == "cut":
                starts.append(begins[document])
                sizes.append(seq_len)
            document += 1
            continue
        fit = int(np.searchsorted(ends, begins[document] + seq_len, side="right"))
        if following < len(long_documents):
            fit = min(fit, int(long_documents[following]))
        size = ends[fit - 1] - begins[document]
        if size:
            starts.append(begins[document])
            sizes.append(size)
        document = fit
    return np.array(starts, np.int64), np.array(sizes, np.int64), len(long_documents)


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
        starts = self._starts[numbers]
        tokens, begins, targets = read_columns(self.store, starts, wider)
        positions = np.arange(wider.start, wider.stop)
        inside = positions < lengths
        tokens[~inside] = 0
        begins &= inside
        begins |= positions == lengths
        mask = (targets & inside & ~begins)[:, 1:]
        mask &= positions[1:] < self._seq_len
        documents = document_starts(self.store, starts, begins[:, :-1], columns.start)
        return tokens[:, :-1], np.where(inside[:, :-1], documents, lengths).astype(np.int32), mask

    def have_target(self, numbers: np.ndarray) -> bool:
        """Whether any of these windows has a target. Takes no memory for padding."""
        return bool(self.read(numbers, range(int(self._lengths[numbers].max())))[2].any())

    def _pack_new(self) -> None:
        shards = self.store.shards
        starts, lengths = [self._starts], [self._lengths]
        for shard in range(self._shards, len(shards.infos)):
            more, sizes, too_long = pack(self.store.document_lengths(shard), self._seq_len, self.store.too_long)
            starts.append(more + shards.starts[shard])
            lengths.append(sizes)
            self.too_long += too_long
            self._shards += 1
        if len(starts) > 1:
            self._starts, self._lengths = np.concatenate(starts), np.concatenate(lengths)
