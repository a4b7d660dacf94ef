"""Packing: which documents share a sequence. Functions of lengths only, so that a resumed run packs the same.

    first_fit   in their order: a document that does not fit starts the next sequence
    best_fit    best fit decreasing (Johnson 1974) within blocks of consecutive documents: the longest first, each into
                the sequence where it leaves the least room

A sequence holds its documents in their order, and sequences have the order of their first documents. A document longer
than a sequence has one of its own, cut off there, or none if it is dropped.
"""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from lmtrain.data.formats import Pack, TooLong

# Documents that are packed together by best fit: enough that the last, half-empty sequences of a block do not count,
# few enough that training starts early and mixes the data as it comes.
_BLOCK = 16_384
# In a number that sorts by room first: the bits of the number of its sequence.
_SEQUENCE_BITS = 32


class Packed(NamedTuple):
    """The `documents` of all sequences, int64, and where those of each sequence begin among them, `offsets` int64
    [sequences + 1]. `too_long` is the number of documents that are longer than a sequence."""

    documents: np.ndarray
    offsets: np.ndarray
    too_long: int


class Pieces(NamedTuple):
    """Sequences as ranges of tokens: `starts` and `lengths`, the first document of each range, int64 [pieces]; those of
    sequence s are `offsets[s]` to `offsets[s + 1]`."""

    starts: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray


def pack(lengths: np.ndarray, seq_len: int, too_long: TooLong, how: Pack) -> Packed:
    """The sequences of `seq_len` tokens of documents with these lengths, int64 [documents]. Empty documents are left
    out."""
    documents = np.flatnonzero(lengths)
    sizes = np.minimum(lengths[documents], seq_len)
    is_long = lengths[documents] > seq_len
    is_kept = ~is_long | (too_long == "cut")
    if how == "first_fit":  # a document that is dropped ends a sequence, too
        sequences = _in_order(sizes, is_long, seq_len)[is_kept]
    else:
        kept, blocks, count = sizes[is_kept].tolist(), [np.zeros(0, np.int64)], 0
        for at in range(0, len(kept), _BLOCK):
            blocks.append(_best_fit(kept[at : at + _BLOCK], seq_len) + count)
            count = int(blocks[-1].max()) + 1
        sequences = np.concatenate(blocks)
    order = np.argsort(sequences, kind="stable")
    counts = np.unique(sequences, return_counts=True)[1]
    return Packed(documents[is_kept][order], np.append(0, np.cumsum(counts)), int(is_long.sum()))


def _in_order(sizes: np.ndarray, is_long: np.ndarray, seq_len: int) -> np.ndarray:
    """The sequence of each document by next fit; a long one has its own. Each sequence costs one search."""
    ends = np.cumsum(sizes)
    long_documents = np.append(np.flatnonzero(is_long), len(sizes))
    counts = []
    document, following = 0, 0  # `following` indexes the first long document that is not packed yet
    while document < len(sizes):
        before = ends[document] - sizes[document]
        fit = min(int(np.searchsorted(ends, before + seq_len, side="right")), int(long_documents[following]))
        if fit == document:
            fit, following = document + 1, following + 1
        counts.append(fit - document)
        document = fit
    return np.repeat(np.arange(len(counts)), counts)


def _best_fit(sizes: list[int], seq_len: int) -> np.ndarray:
    """The sequence of each document of a block."""
    sequences = np.zeros(len(sizes), np.int64)
    rooms: list[int] = []  # ascending: room << bits | number of the sequence
    count = 0
    for document in sorted(range(len(sizes)), key=lambda document: -sizes[document]):
        at = bisect_left(rooms, sizes[document] << _SEQUENCE_BITS)
        if at < len(rooms):
            room, number = divmod(rooms.pop(at), 1 << _SEQUENCE_BITS)
        else:
            room, number, count = seq_len, count, count + 1
        sequences[document] = number
        if room > sizes[document]:
            insort(rooms, room - sizes[document] << _SEQUENCE_BITS | number)
    _, first = np.unique(sequences, return_index=True)
    ranks = np.empty(count, np.int64)
    ranks[np.argsort(first)] = np.arange(count)
    return ranks[sequences]


def kept_lengths(chosen: np.ndarray, rejected: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """How many tokens of each answer are kept of a pair, so that both fit: the longer one is cut off to half of the
    sequence at least."""
    of_chosen = np.minimum(chosen, np.maximum(seq_len - seq_len // 2, seq_len - rejected))
    return of_chosen, np.minimum(rejected, seq_len - of_chosen)


def pieces_of(packed: Packed, lengths: np.ndarray, seq_len: int, in_pairs: bool) -> Pieces:
    """The ranges of tokens of sequences. Documents have these `lengths`; with `in_pairs`, those of `packed` are pairs
    of consecutive ones."""
    documents, offsets = packed.documents, packed.offsets
    if in_pairs:
        documents, offsets = (2 * documents[:, None] + np.arange(2)).reshape(-1), 2 * offsets
        chosen, rejected = lengths[documents].reshape(-1, 2).T
        kept = np.stack(kept_lengths(chosen, rejected, seq_len), axis=1).reshape(-1)
    else:
        kept = np.minimum(lengths[documents], seq_len)
    begins = (np.cumsum(lengths) - lengths)[documents]
    is_first = np.ones(len(documents), bool)
    is_first[1:] = begins[1:] != begins[:-1] + kept[:-1]
    is_first[offsets[:-1]] = True
    first = np.flatnonzero(is_first)
    sizes = np.add.reduceat(kept, first) if len(first) else kept
    return Pieces(begins[first], sizes, documents[first], np.searchsorted(first, offsets))
