"""Files of token ids that other systems wrote, read in place: llm.c, nanoGPT, Megatron, OLMo.

A file is one array of ids. Where documents begin is either at the EOS tokens in it or in an index next to it. Files are
read with `pread`, since a file that shrinks under a memory map kills the process.
"""

import bisect
import functools
import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import read_range

# The .idx of a Megatron-LM dataset: where the sequences and documents of its .bin begin.
#
#     header     "MMIDIDX", two zero bytes, version (uint64), code of the ids' type (uint8), numbers of sequences and of
#                entries (uint64)
#     lengths    of each sequence in tokens (int32)
#     pointers   byte of the .bin at which each sequence begins (int64)
#     documents  entries: the first sequence of each document, then the number of sequences (int64)
#     modes      of each sequence (int8), only in multimodal datasets
#
# All numbers are little-endian. Sequences follow each other without gaps, as Megatron's builder writes them; sequences
# and documents may be empty.

MEGATRON = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Integer types by their codes in an .idx.
_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# Entries of a table that are checked at once: 12 MB.
_CHECKED = 1 << 20

# `read(start, end)` returns bytes of a file.
Read = Callable[[int, int], bytes]


@dataclass(frozen=True, kw_only=True)
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
    return dtype, MegatronIndex(
        file=url, bytes=size, checksum="", sequences=sequences, entries=entries, pointers=pointers, documents=documents
    )


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


_PART_BYTES = 4096
_PARTS = 32


def sample_checksum(size: int, read: Callable[[int, int], bytes]) -> str:
    """SHA-256 of the size of a file and of parts at equal distances, the first and the last bytes among them.

    `read(start, end)` returns bytes of the file. A file of up to 128 KB is read completely.
    """
    digest = hashlib.sha256(str(size).encode())
    if size <= _PARTS * _PART_BYTES:
        digest.update(read(0, size))
        return digest.hexdigest()
    for part in range(_PARTS):
        start = (size - _PART_BYTES) * part // (_PARTS - 1)
        digest.update(read(start, start + _PART_BYTES))
    return digest.hexdigest()


# Ids that are checked at once.
_SCANNED = 1 << 22


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """How a file holds its `tokens` ids: `dtype` as stored, from byte `offset` on, each below `vocab_size`.

    Documents begin after each id `eos` (`last`), at each (`first`), or where the `index` says; with neither of them
    they are unknown.
    """

    dtype: str
    offset: int
    tokens: int
    vocab_size: int
    eos: int | None = None
    eos_at: Literal["first", "last"] = "last"
    index: MegatronIndex | None = None

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "TokenLayout":
        index = described["index"]
        return cls(**{**described, "index": None if index is None else MegatronIndex(**index)})


class TokenFile:
    """Random access to the ids of a file, whose index is `index_path` if it has one. `checksum` is the sampled one of
    the file, and `modified` is when it was last modified, in ns; None for a copy that nothing else writes.

    Raises `UserError` if the file or its index has changed, or an id is not in the vocabulary.
    """

    def __init__(
        self, path: str, layout: TokenLayout, checksum: str, modified: int | None, index_path: str | None = None
    ):
        self.path = path
        self._layout = layout
        self._dtype = np.dtype(layout.dtype)
        self._file = os.open(path, os.O_RDONLY)
        self._index = None if index_path is None else os.open(index_path, os.O_RDONLY)
        self._known = [] if modified is None else [(path, modified, checksum)]
        if index_path is not None and layout.index is not None and layout.index.modified is not None:
            self._known.append((index_path, layout.index.modified, layout.index.checksum))
        self._check()
        self._begin = functools.lru_cache(1 << 14)(self._read_begin)

    def close(self) -> None:
        os.close(self._file)
        if self._index is not None:
            os.close(self._index)

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids [count] from `start` on, as stored; and where documents begin, ascending, int64, relative to `start`.

        The latter may include the position after the last id, and leave out the first.
        """
        layout, ids = self._layout, self._ids(start, count)
        if layout.index is not None:
            first = bisect.bisect_left(range(layout.index.entries), start, key=self._begin)
            last = bisect.bisect_right(range(layout.index.entries), start + count, key=self._begin)
            return ids, np.array([self._begin(entry) - start for entry in range(first, last)], np.int64)
        if layout.eos is None:
            return ids, np.zeros(0, np.int64)
        return ids, np.flatnonzero(ids == layout.eos) + int(layout.eos_at == "last")

    def scan(self, report: Callable[[int], None] = lambda read: None) -> int:
        """Read the index and all ids, and return the CRC-32 of the ids. `report` gets the number of bytes of each part.

        Raises `UserError` for a corrupt index, or an id that is not in the vocabulary.
        """
        layout, checksum = self._layout, 0
        if layout.index is not None:
            size = layout.tokens * self._dtype.itemsize
            check_index(layout.index, self._read_index, self._dtype.itemsize, size)
        for start in range(0, layout.tokens, _SCANNED):
            ids = self._ids(start, min(_SCANNED, layout.tokens - start))
            checksum = zlib.crc32(ids, checksum)
            report(ids.nbytes)
        return checksum

    def _ids(self, start: int, count: int) -> np.ndarray:
        layout = self._layout
        self._check()
        size = count * self._dtype.itemsize
        place = layout.offset + start * self._dtype.itemsize
        content = _read(self._file, size, place)
        if len(content) < size:
            raise changed(self.path)
        ids = np.frombuffer(content, self._dtype)
        if count and (int(ids.max()) >= layout.vocab_size or int(ids.min()) < 0):
            wrong = int(np.flatnonzero((ids < 0) | (ids >= layout.vocab_size))[0])
            raise UserError(
                f"{self.path}: token id {int(ids[wrong])} at byte {place + wrong * self._dtype.itemsize:,} is not in "
                f"the vocabulary of {layout.vocab_size:,} tokens; set data.tokenizer to that of these files, or "
                "data.format.dtype if ids have another size"
            )
        return ids

    def _check(self) -> None:
        """Raise `UserError` if another program has written the file or its index."""
        for path, modified, checksum in self._known:
            try:
                now = os.stat(path).st_mtime_ns  # not of the open file, which may have been replaced
            except FileNotFoundError:
                raise changed(path) from None
            if now != modified and not _is_unchanged(path, now, checksum):
                raise changed(path)

    def _read_begin(self, entry: int) -> int:
        """The token at which document `entry` begins; for the last entry the number of tokens."""
        index = self._layout.index
        assert index is not None
        sequence = self._number(index.documents + 8 * entry)
        if sequence >= index.sequences:
            return self._layout.tokens
        return self._number(index.pointers + 8 * sequence) // self._dtype.itemsize

    def _number(self, place: int) -> int:
        content = self._read_index(place, place + 8)
        if len(content) < 8:
            raise changed(self.path)
        return int.from_bytes(content, "little", signed=True)

    def _read_index(self, start: int, end: int) -> bytes:
        assert self._index is not None
        return _read(self._index, end - start, start)


@functools.lru_cache(1 << 14)
def _is_unchanged(path: str, modified: int, checksum: str) -> bool:
    """Whether a file that was last `modified` at another time still has this sampled checksum; then logs it, once."""
    size = os.path.getsize(path)
    is_same = sample_checksum(size, functools.partial(read_range, path)) == checksum
    if is_same:
        log_touched([path])
    return is_same


def log_touched(paths: Sequence[str]) -> None:
    """Log that only the times of files have changed."""
    more = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
    log.info(f"{paths[0]}{more}: modification time only has changed; size and samples are the same, so it is accepted")


def _read(file: int, size: int, place: int) -> bytes:
    """Up to `size` bytes; `os.pread` reads at most 2 GiB, and may read less."""
    parts = []
    while size > 0 and (part := os.pread(file, size, place)):
        parts.append(part)
        size, place = size - len(part), place + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def changed(path: str) -> UserError:
    """The error for a file that is not the one whose size, time and sampled checksum are in the cache's manifest."""
    return UserError(
        f"{path}: this file has changed since the run first read it, so a resumed run would read other data. Restore "
        "it, or choose another data.cache_dir and trainer.id to start with what it has now"
    )
