"""Random access to the tokens of a cache, as if they were one long array."""

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import BLOCK_TOKENS, ShardInfo
from lmtrain.data.shards import Shards

# A reader holds a file descriptor; the default limit of a process is 1024.
_OPEN_READERS = 64

# Random access reads exactly the records asked for, in the calling thread.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"

# block, offset in it, row, column, how many tokens: a stretch of a block that goes to a place in the result
Piece = tuple[int, int, int, int, int]


class TokenStore:
    """The tokens of one split, in source order across shards. `locate` gives a shard's local file.

    Not thread-safe: each thread that reads makes its own (opening is cheap; shards open when first read).
    """

    def __init__(self, name: str, shards: Shards, dtype: str, locate: Callable[[ShardInfo], str]):
        self.name = name
        self.shards = shards
        self._dtype = np.dtype(dtype)
        self._locate = locate
        self._readers: OrderedDict[int, Any] = OrderedDict()

    def read(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows `[start, start + length)`: tokens int32 [len(starts), length], 0 past the end of the data; and
        whether a document begins there, bool [len(starts), length].

        All blocks of one shard are fetched in one call, which is what makes ArrayRecord fast.
        """
        tokens = np.zeros((len(starts), length), np.int32)
        begins = np.zeros((len(starts), length), bool)
        for shard, pieces in self._pieces(starts, length).items():
            blocks = sorted({block for block, *_ in pieces})
            records = dict(zip(blocks, self._read_blocks(shard, blocks), strict=True))
            in_shard = self.shards.infos[shard].tokens
            for block, offset, row, column, count in pieces:
                record = records[block]
                size = min(BLOCK_TOKENS, in_shard - block * BLOCK_TOKENS)
                content = np.frombuffer(record, self._dtype, size)
                tokens[row, column : column + count] = content[offset : offset + count]
                ends = np.frombuffer(record, "<u2", offset=size * self._dtype.itemsize)
                first, last = np.searchsorted(ends, (offset, offset + count), side="right")
                places = ends[first:last].astype(np.int64) + (column - offset)
                begins[row, places[places < length]] = True
        return tokens, begins

    def _pieces(self, starts: np.ndarray, length: int) -> dict[int, list[Piece]]:
        """The pieces of each shard that the windows need."""
        before = self.shards.starts  # once, as it may grow meanwhile
        total = int(before[-1])
        pieces: dict[int, list[Piece]] = {}
        first = np.searchsorted(before, starts, side="right") - 1
        for row, (start, shard) in enumerate(zip(starts.tolist(), first.tolist(), strict=True)):
            position, end = start, min(start + length, total)
            while position < end:
                inside = position - int(before[shard])
                left = int(before[shard + 1]) - position
                if left == 0:  # this shard is used up, or empty
                    shard += 1
                    continue
                block, offset = divmod(inside, BLOCK_TOKENS)
                count = min(BLOCK_TOKENS - offset, left, end - position)
                pieces.setdefault(shard, []).append((block, offset, row, position - start, count))
                position += count
        return pieces

    def _read_blocks(self, shard: int, blocks: list[int]) -> list[bytes]:
        info = self.shards.infos[shard]
        try:
            records: list[bytes] = self._reader(shard).read(blocks)
        except RuntimeError as error:  # ArrayRecord checks every record it reads
            raise damaged(self._locate(info), f"cannot be read: {str(error).splitlines()[0]}") from None
        return records

    def _reader(self, shard: int) -> Any:
        if shard in self._readers:
            self._readers.move_to_end(shard)
            return self._readers[shard]
        from array_record.python.array_record_module import ArrayRecordReader

        reader = ArrayRecordReader(self._locate(self.shards.infos[shard]), _READER_OPTIONS)
        self._readers[shard] = reader
        if len(self._readers) > _OPEN_READERS:
            self._readers.popitem(last=False)[1].close()
        return reader


def check_file(path: str, info: ShardInfo) -> None:
    """Raise `UserError` if a shard is missing or not of the size it should be.

    ArrayRecord itself opens a truncated file as an empty one.
    """
    size = os.path.getsize(path) if os.path.isfile(path) else None
    if size != info.bytes:
        raise damaged(path, "is missing" if size is None else f"has {size:,} bytes instead of {info.bytes:,}")


def damaged(path: str, what: str) -> UserError:
    """The error for a file of a cache that is not as it was written: `what` is wrong with it."""
    manifest = os.path.join(os.path.dirname(path), "manifest.json")
    return UserError(
        f"{path} {what}: the cache is damaged; delete {path.removesuffix('.arrayrecord')}.* and {manifest} "
        "and run `lmtrain preprocess` again"
    )
