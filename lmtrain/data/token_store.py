"""Random access to the tokens of a finished cache, as if they were one long array."""

import os
from collections import OrderedDict
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.data.manifest import BLOCK_TOKENS, Manifest

# A reader holds a file descriptor; the default limit of a process is 1024.
_OPEN_READERS = 64

# Random access reads exactly the records asked for, in the calling thread.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class TokenStore:
    """The tokens of one split, in source order across shards.

    Not thread-safe: each thread that reads makes its own (opening is cheap; shards open when first read).
    """

    def __init__(self, folder: str, manifest: Manifest):
        self.tokens = manifest.tokens
        self._folder = folder
        self._shards = manifest.shards
        self._dtype = np.dtype(manifest.dtype)
        self._starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)])
        self._readers: OrderedDict[int, Any] = OrderedDict()

    def check_files(self) -> None:
        """Raise `UserError` for shards that are missing or not of the size the manifest says.

        ArrayRecord itself opens a truncated file as an empty one.
        """
        for shard in self._shards:
            path = os.path.join(self._folder, shard.file)
            size = os.path.getsize(path) if os.path.isfile(path) else None
            if size != shard.bytes:
                found = "is missing" if size is None else f"has {size:,} bytes instead of {shard.bytes:,}"
                raise UserError(
                    f"{path} {found}: the cache is damaged; delete {path.removesuffix('.arrayrecord')}.* and "
                    f"{os.path.join(self._folder, 'manifest.json')} and run `lmtrain preprocess` again"
                )

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows `[start, start + length)` for every start, int32 [len(starts), length]; 0 past the end of the data.

        All blocks of one shard are fetched in one call, which is what makes ArrayRecord fast.
        """
        out = np.zeros((len(starts), length), np.int32)
        pieces = self._pieces(starts, length)
        for shard, wanted in pieces.items():
            blocks = sorted({block for block, *_ in wanted})
            records = dict(zip(blocks, self._reader(shard).read(blocks), strict=True))
            for block, offset, row, column, count in wanted:
                tokens = np.frombuffer(records[block], self._dtype)
                out[row, column : column + count] = tokens[offset : offset + count]
        return out

    def _pieces(self, starts: np.ndarray, length: int) -> dict[int, list[tuple[int, int, int, int, int]]]:
        """For each shard, (block, offset in block, row, column, count) of every stretch that the windows need."""
        pieces: dict[int, list[tuple[int, int, int, int, int]]] = {}
        for row, start in enumerate(starts.tolist()):
            position, end = start, min(start + length, self.tokens)
            shard = int(np.searchsorted(self._starts, position, side="right")) - 1
            while position < end:
                inside = position - int(self._starts[shard])
                if inside == self._shards[shard].tokens:  # this shard is used up, or empty
                    shard += 1
                    continue
                block, offset = divmod(inside, BLOCK_TOKENS)
                count = min(BLOCK_TOKENS - offset, self._shards[shard].tokens - inside, end - position)
                pieces.setdefault(shard, []).append((block, offset, row, position - start, count))
                position += count
        return pieces

    def _reader(self, shard: int) -> Any:
        if shard in self._readers:
            self._readers.move_to_end(shard)
            return self._readers[shard]
        from array_record.python.array_record_module import ArrayRecordReader

        reader = ArrayRecordReader(os.path.join(self._folder, self._shards[shard].file), _READER_OPTIONS)
        self._readers[shard] = reader
        if len(self._readers) > _OPEN_READERS:
            self._readers.popitem(last=False)[1].close()
        return reader
