"""Finished shards of a split in source order: all of them, or those so far while the cache is being built.

The builder adds shards without gaps; a reader waits for the number of tokens that it needs. The data that is read
therefore never depends on how fast the cache grows.
"""

import itertools
import math
import threading
from collections.abc import Iterator

import numpy as np

from lmtrain.data.cache_manifest import CacheManifest, ShardInfo


class Shards:
    """Shards so far (`infos`); `starts[i]` is the number of tokens before shard i, and its last entry the total.

    `complete` is true once no more will be added. Any number of threads may read while one adds.
    """

    def __init__(self) -> None:
        self.infos: list[ShardInfo] = []
        self.starts = np.zeros(1, np.int64)
        self.complete = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, manifest: CacheManifest) -> "Shards":
        """Shards of a finished cache."""
        shards = cls()
        shards.infos = list(manifest.shards)
        shards.starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)]).astype(np.int64)
        shards.complete = True
        return shards

    @classmethod
    def of_one(cls, info: ShardInfo) -> "Shards":
        """A single shard."""
        shards = cls()
        shards.add(info)
        shards.finish()
        return shards

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def add(self, info: ShardInfo) -> None:
        with self._changed:
            self.infos.append(info)
            self.starts = np.append(self.starts, self.starts[-1] + info.tokens)
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self.complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in all current and later readers."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a failed build, or of a corrupt shard."""
        if self._error is not None:
            raise self._error

    def follow(self) -> Iterator[ShardInfo]:
        """Iterate over all shards in order, waiting for missing ones. Raises the error of a failed build."""
        for number in itertools.count():
            self._wait(shards=number + 1)
            if number == len(self.infos):
                return
            yield self.infos[number]

    def wait_for(self, tokens: int | None) -> int:
        """Wait for `tokens` tokens, or until the cache is complete (None), and return the number of tokens.

        Raises the error of a failed build, whatever has been built.
        """
        self._wait(tokens=math.inf if tokens is None else tokens)
        return self.tokens

    def _wait(self, shards: float = math.inf, tokens: float = math.inf) -> None:
        """Wait until there are as many shards or tokens, or no more will be added."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self.complete or len(self.infos) >= shards or self.tokens >= tokens
            )
            self.check()
