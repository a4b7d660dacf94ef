"""Packing of conversations and completions into windows, none of which splits one."""

from typing import NamedTuple

import numpy as np

from lmtrain.data.formats import TooLong
from lmtrain.data.token_store import TokenStore


class Packed(NamedTuple):
    """Windows of a shard: where each starts and its length, in tokens, int64 [windows]; the number of documents that
    are longer than a window."""

    starts: np.ndarray
    lengths: np.ndarray
    too_long: int


def pack(lengths: np.ndarray, seq_len: int, too_long: TooLong) -> Packed:
    """Next-fit packing of documents in their order: a window takes documents as long as they fit.

    A document longer than `seq_len` has a window of its own, cut off, or none if it is dropped. `lengths` [documents]
    are in tokens. The windows depend on the arguments only.
    """
    ends = np.cumsum(lengths)
    begins = ends - lengths
    are_long = lengths > seq_len
    long_ones = np.flatnonzero(are_long)
    starts, sizes = [], []
    document, following = 0, 0  # `following` indexes the first long document that is not packed yet
    while document < len(lengths):
        if are_long[document]:
            following += 1
            if too_long == "cut":
                starts.append(begins[document])
                sizes.append(seq_len)
            document += 1
            continue
        fit = int(np.searchsorted(ends, begins[document] + seq_len, side="right"))
        if following < len(long_ones):
            fit = min(fit, int(long_ones[following]))
        size = ends[fit - 1] - begins[document]
        if size:
            starts.append(begins[document])
            sizes.append(size)
        document = fit
    return Packed(np.array(starts, np.int64), np.array(sizes, np.int64), len(long_ones))


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

    def for_evaluation(self) -> int:
        """Number of windows."""
        return self.for_training()

    def wait_for(self, number: int | None) -> int:
        """Wait until `number` windows are known, or all (None); return the number of known windows."""
        shards = self.store.shards
        while True:
            was_complete = shards.complete  # before packing, since the last shard may be added in between
            known = self.for_training()
            if was_complete or (number is not None and known >= number):
                return known
            shards.wait_for(None if number is None else int(shards.starts[self._shards]) + 1)

    def read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, first tokens of documents, and loss mask of windows; see `TextWindows.read`.

        A position's target is the next token, if it is one of the same document. Padding is one more document; numbers
        past the last window give padding.
        """
        known = numbers < len(self._starts)
        numbers = np.where(known, numbers, 0)
        lengths = np.where(known, self._lengths[numbers], 0)[:, None]
        tokens, begins, targets = self.store.read_targets(self._starts[numbers], self._seq_len)
        place = np.arange(self._seq_len)
        inside = place < lengths
        tokens[~inside] = 0
        begins &= place <= lengths
        begins |= place == lengths
        mask = np.zeros_like(begins)
        mask[:, :-1] = (targets & inside & ~begins)[:, 1:]
        return tokens, begins, mask

    def _pack_new(self) -> None:
        shards = self.store.shards
        parts = [Packed(self._starts, self._lengths, self.too_long)]
        for shard in range(self._shards, len(shards.infos)):
            packed = pack(self.store.document_lengths(shard), self._seq_len, self.store.too_long)
            parts.append(packed._replace(starts=packed.starts + int(shards.starts[shard])))
            self._shards += 1
        if len(parts) > 1:
            self._starts, self._lengths = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            self.too_long = sum(part.too_long for part in parts)
