"""Random access to the tokens of a cache as one long array."""

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lmtrain.data.cache_manifest import BLOCK_TOKENS, ShardInfo, Shards
from lmtrain.data.formats import Pack, TooLong
from lmtrain.data.token_file import TokenFile, TokenLayout
from lmtrain.runtime.errors import ReadError, UserError

# The threads of ArrayRecord, which it starts with its first reader or writer in a process.
#
# If one of them cannot be started, ArrayRecord does not raise an error but waits forever, for the threads that it has
# started already.

# ArrayRecord's number, whatever the machine and the options.
_THREADS = 64


@functools.cache
def check_threads() -> None:
    """Raise `ReadError` if the process cannot have these threads: tries it, with the same number of Python's."""
    end = threading.Event()
    started = []
    try:
        for _ in range(_THREADS):
            thread = threading.Thread(target=end.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise ReadError(
            f"cannot start the {_THREADS} threads that read and write token shards: {error}. Free memory, or raise the "
            "limits on memory and threads of this process: see `ulimit -v`, `ulimit -u`, and those of its container"
        ) from None
    finally:
        end.set()
        for thread in started:
            thread.join()


# Maximum number of open readers. Each holds a file descriptor; the default limit of a process is 1024.
_OPEN_READERS = 64

# Random access: read exactly the requested records, in the calling thread.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"

# Part of a block and its place in the result: block, offset in the block, row, column, number of tokens.
Piece = tuple[int, int, int, int, int]


class Span(NamedTuple):
    """`size` tokens from `start` on, and where they are in the result."""

    row: int
    column: int
    start: int
    size: int


class TokenStore:
    """Tokens of one split, in source order across shards. `locate` returns the local file of a shard.

    `too_long` is the setting of `ChatFormat`, None for text; others have shards of format 3. `has_pairs`: documents are
    pairs of answers, which stay together. `pack` is the setting of `DataConfig`.

    Not thread-safe: use one store per thread. Opening is cheap, since shards are opened at their first read.
    """

    def __init__(
        self,
        name: str,
        shards: Shards,
        dtype: str,
        locate: Callable[[ShardInfo], str],
        too_long: TooLong | None = None,
        has_pairs: bool = False,
        pack: Pack = "first_fit",
    ):
        self.name = name
        self.shards = shards
        self.has_targets = too_long is not None
        self.too_long: TooLong = too_long or "cut"
        self.has_pairs = has_pairs
        self.pack = pack
        self._dtype = np.dtype(dtype)
        self._locate = locate
        self._readers: OrderedDict[int, Any] = OrderedDict()

    def read(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the windows `[start, start + length)`; see `read_spans`. Tokens past the end of the data are 0."""
        spans = [Span(row, 0, start, length) for row, start in enumerate(starts.tolist())]
        return self.read_spans(spans, (len(starts), length))

    def read_spans(self, spans: Sequence[Span], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the tokens of all spans into arrays of a shape [rows, length], 0 and false elsewhere.

        Returns three arrays: tokens int32; bool, true at the first token of each document, though perhaps not of one
        that starts with a span; and bool, true for targets: in text, everywhere. All blocks of one shard are read in
        one call, for speed.
        """
        self.shards.check()
        length = shape[1]
        tokens, begins = np.zeros(shape, np.int32), np.zeros(shape, bool)
        targets = np.full(shape, not self.has_targets)
        for shard, pieces in self._pieces(spans).items():
            if self.shards.infos[shard].layout is not None:
                self._read_file(shard, pieces, tokens, begins)
                continue
            dtype = np.dtype(self.shards.infos[shard].dtype or self._dtype)
            blocks = sorted({block for block, *_ in pieces})
            records = dict(zip(blocks, self._read_blocks(shard, blocks), strict=True))
            in_shard = self.shards.infos[shard].tokens
            for block, offset, row, column, count in pieces:
                record = records[block]
                size = min(BLOCK_TOKENS, in_shard - block * BLOCK_TOKENS)
                content = np.frombuffer(record, dtype, size)
                tokens[row, column : column + count] = content[offset : offset + count]
                bits = -(-size // 8) if self.has_targets else 0
                end_of_ends = len(record) - bits
                at_ends = size * dtype.itemsize
                ends = np.frombuffer(record, "<u2", (end_of_ends - at_ends) // 2, at_ends)
                if self.has_targets:
                    packed = np.frombuffer(record, np.uint8, offset=end_of_ends)
                    is_target = np.unpackbits(packed, count=offset + count, bitorder="little")[offset:]
                    targets[row, column : column + count] = is_target
                first, last = np.searchsorted(ends, (offset, offset + count), side="right")
                columns = ends[first:last].astype(np.int64) + (column - offset)
                begins[row, columns[columns < length]] = True
        return tokens, begins, targets

    def _read_file(self, shard: int, pieces: list[Piece], tokens: np.ndarray, begins: np.ndarray) -> None:
        """Read pieces of a file of token ids into the rows of `tokens` and `begins`."""
        file = self._reader(shard)
        for block, offset, row, column, count in pieces:
            ids, first = file.read(block * BLOCK_TOKENS + offset, count)
            tokens[row, column : column + count] = ids
            columns = first + column
            begins[row, columns[columns < begins.shape[1]]] = True

    def document_lengths(self, shard: int) -> np.ndarray:
        """The length of each document of a shard with targets, in tokens, int64 [documents]."""
        blocks = -(-self.shards.infos[shard].tokens // BLOCK_TOKENS)
        (record,) = self._read_blocks(shard, [blocks])
        return np.frombuffer(record, "<u4").astype(np.int64)

    def _pieces(self, spans: Sequence[Span]) -> dict[int, list[Piece]]:
        """Pieces of each shard that the spans consist of."""
        before = self.shards.starts  # read once, since it may grow in the meantime
        total = int(before[-1])
        pieces: dict[int, list[Piece]] = {}
        first = np.searchsorted(before, [span.start for span in spans], side="right") - 1
        for (row, column, start, length), shard in zip(spans, first.tolist(), strict=True):
            position, end = start, min(start + length, total)
            while position < end:
                inside = position - int(before[shard])
                left = int(before[shard + 1]) - position
                if left == 0:  # at the end of this shard, or it is empty
                    shard += 1
                    continue
                block, offset = divmod(inside, BLOCK_TOKENS)
                count = min(BLOCK_TOKENS - offset, left, end - position)
                pieces.setdefault(shard, []).append((block, offset, row, column + position - start, count))
                position += count
        return pieces

    def _read_blocks(self, shard: int, blocks: list[int]) -> list[bytes]:
        info = self.shards.infos[shard]
        check_threads()
        try:
            records: list[bytes] = self._reader(shard).read(blocks)
        except RuntimeError as error:  # ArrayRecord verifies the checksum of every record
            raise corrupt_shard(self._locate(info), f"cannot be read: {str(error).splitlines()[0]}") from None
        return records

    def _reader(self, shard: int) -> Any:
        if shard in self._readers:
            self._readers.move_to_end(shard)
            return self._readers[shard]
        reader = self._open(self.shards.infos[shard])
        self._readers[shard] = reader
        if len(self._readers) > _OPEN_READERS:
            self._readers.popitem(last=False)[1].close()
        return reader

    def _open(self, info: ShardInfo) -> Any:
        if info.layout is not None:
            return open_token_file(info, self._locate)
        from array_record.python.array_record_module import ArrayRecordReader

        return ArrayRecordReader(self._locate(info), _READER_OPTIONS)


def open_token_file(info: ShardInfo, locate: Callable[[ShardInfo], str]) -> TokenFile:
    """Open a file of token ids that is read in place. Raises `UserError` if it has changed."""
    assert info.layout is not None
    layout = TokenLayout.of(info.layout)
    index = None
    try:
        if layout.index is not None:
            index = locate(
                replace(info, file=layout.index.file, bytes=layout.index.bytes, sha256=layout.index.checksum)
            )
        return TokenFile(locate(info), layout, info.sha256, info.source["modified"], index)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise UserError(f"{error.filename}: {reason}; data.train_urls names it, and it is read in place") from None


def read_columns(store: TokenStore, starts: np.ndarray, columns: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`TokenStore.read` of these positions of windows that begin at `starts`."""
    # `read` does not know whether a document starts at its first token
    lead = int(columns.start > 0)
    tokens, begins, targets = store.read(starts + columns.start - lead, len(columns) + lead)
    return tokens[:, lead:], begins[:, lead:], targets[:, lead:]


def document_starts(before: Callable[[np.ndarray, range], np.ndarray], begins: np.ndarray, first: int) -> np.ndarray:
    """Where the document of each token of a window starts, in positions of the window, int32 [windows, columns].

    `begins` are those of the columns from `first` on, and `before(rows, columns)` reads those of other columns. A
    document that started before the window is at 0; for one that started before the column `first`, the tokens before
    are searched backwards.
    """
    opened = np.zeros(len(begins), np.int32)
    unknown, end = np.flatnonzero(~begins[:, 0]), first
    while len(unknown) and end > 0:
        begin = max(end - BLOCK_TOKENS, 0)
        found = before(unknown, range(begin, end))
        is_known = found.any(axis=1)
        opened[unknown[is_known]] = end - 1 - found[is_known, ::-1].argmax(axis=1)
        unknown, end = unknown[~is_known], begin
    columns = np.arange(first, first + begins.shape[1], dtype=np.int32)
    return np.maximum.accumulate(np.where(begins, columns, opened[:, None]), axis=1)


def check_file(path: str, info: ShardInfo) -> None:
    """Raise `UserError` if a shard is missing or has the wrong size.

    ArrayRecord itself opens a truncated file as an empty one.
    """
    if info.layout is not None:
        open_token_file(info, lambda info: info.file).close()
        return
    size = os.path.getsize(path) if os.path.isfile(path) else None
    if size != info.bytes:
        raise corrupt_shard(path, "is missing" if size is None else f"has {size:,} bytes instead of {info.bytes:,}")


def corrupt_shard(path: str, what: str) -> UserError:
    """The error for a missing or corrupt file of a cache; `what` describes the problem."""
    manifest = os.path.join(os.path.dirname(path), "manifest.json")
    return UserError(
        f"{path} {what}: the cache is corrupt; delete {path.removesuffix('.arrayrecord')}.* and {manifest} "
        "and run `lmtrain preprocess` again"
    )
