"""The .idx of a Megatron-LM dataset: where the sequences and documents of its .bin begin.

    header     "MMIDIDX", two zero bytes, version (uint64), code of the ids' type (uint8), numbers of sequences and of
               entries (uint64)
    lengths    of each sequence in tokens (int32)
    pointers   byte of the .bin at which each sequence begins (int64)
    documents  entries: the first sequence of each document, then the number of sequences (int64)
    modes      of each sequence (int8), only in multimodal datasets

All numbers are little-endian. Sequences follow each other without gaps, as Megatron's builder writes them; sequences
and documents may be empty.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lmtrain.config.errors import UserError

MEGATRON = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Integer types by their codes in an .idx.
_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# Entries of a table that are checked at once: 12 MB.
_CHECKED = 1 << 20

# `read(start, end)` returns bytes of a file.
Read = Callable[[int, int], bytes]


@dataclass(frozen=True)
class MegatronIndex:
    """The tables of an .idx: `pointers` and `documents` are bytes of the .idx where they start. `file`, `bytes` and
    `checksum` are those of the .idx, and `modified` is when it was last modified, in ns; None for one at a URL.
    """

    file: str
    bytes: int
    checksum: str
    sequences: int
    entries: int
    pointers: int
    documents: int
    modified: int | None = None  # unknown in manifests of earlier versions


def read_index(url: str, size: int, read: Read, bin_url: str, bin_bytes: int) -> tuple[np.dtype, MegatronIndex]:
    """The type of the ids, and the index without its checksum and time, from its header. Raises `UserError`."""
    start = read(0, _HEADER.size)
    if len(start) < _HEADER.size or not start.startswith(MEGATRON):
        raise UserError(f"{url}: not an index of Megatron-LM, but {bin_url} is next to it; rename one of them")
    _, version, code, sequences, entries = _HEADER.unpack(start)
    if version != 1:
        raise UserError(f"{url}: version {version} of Megatron-LM's index is not supported, only 1")
    if code not in _TYPES:
        raise UserError(f"{url}: its data type (code {code}) is not one of token ids")
    pointers = _HEADER.size + 4 * sequences
    documents = pointers + 8 * sequences
    end = documents + 8 * entries
    if size < end or not entries:
        raise UserError(f"{url}: truncated: {size:,} bytes for {sequences:,} sequences and {entries:,} documents")
    if size not in (end, end + sequences):
        raise UserError(
            f"{url}: corrupt: {size:,} bytes, but {sequences:,} sequences and {entries:,} documents take {end:,}"
        )
    dtype, bin_end = np.dtype(_TYPES[code]), 0
    if sequences:
        last = int.from_bytes(read(documents - 8, documents), "little", signed=True)
        bin_end = last + int.from_bytes(read(pointers - 4, pointers), "little", signed=True) * dtype.itemsize
    if bin_end != bin_bytes:
        raise UserError(
            f"{bin_url}: has {bin_bytes:,} bytes, but {url} describes {bin_end:,}: one of them is truncated"
        )
    return dtype, MegatronIndex(url, size, "", sequences, entries, pointers, documents)


def check_index(index: MegatronIndex, read: Read, item_bytes: int, bin_bytes: int) -> None:
    """Read all tables of an index, in parts. Raises `UserError` with the first entry that is wrong.

    Each sequence must begin where the one before it ends, the last one at the end of the .bin; the documents must
    begin at sequences in ascending order, the first at 0.
    """
    end = 0
    for first in range(0, index.sequences, _CHECKED):
        count = min(_CHECKED, index.sequences - first)
        lengths = _table(index, read, index.pointers + 4 * (first - index.sequences), count, "<i4")
        pointers = _table(index, read, index.pointers + 8 * first, count, "<i8")
        borders = end + np.cumsum(np.append(0, lengths), dtype=np.int64) * item_bytes
        wrong = np.flatnonzero((lengths < 0) | (pointers != borders[:-1]) | (borders[1:] > bin_bytes))
        if len(wrong):
            at = int(wrong[0])
            where = (
                f"sequence {first + at:,} has {int(lengths[at]):,} tokens from byte {int(pointers[at]):,} of the .bin"
            )
            raise _corrupt(index, f"{where}, which has {bin_bytes:,}; the one before it ends at {int(borders[at]):,}")
        end = int(borders[-1])
    if end != bin_bytes:
        raise _corrupt(index, f"its sequences end at byte {end:,} of the .bin, which has {bin_bytes:,}")
    before = 0
    for first in range(0, index.entries, _CHECKED):
        count = min(_CHECKED, index.entries - first)
        documents = _table(index, read, index.documents + 8 * first, count, "<i8")
        wrong = np.flatnonzero((documents < np.append(before, documents[:-1])) | (documents > index.sequences))
        if first == 0 and documents[0]:
            wrong = np.zeros(1, np.int64)
        if len(wrong):
            at = int(wrong[0])
            before = int(documents[at - 1]) if at else before
            where = f"document {first + at:,} begins at sequence {int(documents[at]):,}"
            raise _corrupt(index, f"{where} of {index.sequences:,}, and the one before it at {before:,}")
        before = int(documents[-1])
    if before != index.sequences:
        raise _corrupt(index, f"its documents end at sequence {before:,} of {index.sequences:,}")


def _table(index: MegatronIndex, read: Read, place: int, count: int, dtype: str) -> np.ndarray:
    size = count * np.dtype(dtype).itemsize
    content = read(place, place + size)
    if len(content) < size:
        raise UserError(f"{index.file}: truncated while it was read")
    return np.frombuffer(content, dtype)


def _corrupt(index: MegatronIndex, what: str) -> UserError:
    return UserError(f"{index.file}: corrupt: {what}; write the .bin and its .idx again")
