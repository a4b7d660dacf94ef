"""The finished shards of a split, in source order: all of them, or, while the cache is being built, those so far.

Whoever builds the cache adds shards without a gap; whoever reads it waits for as many tokens as it needs. What is read
therefore never depends on how fast the cache grows.
"""

import threading
from collections.abc import Iterator

import numpy as np

from lmtrain.data.cache_manifest import Manifest, ShardInfo


class Shards:
    """`infos` are the shards so far; `starts[i]` is how many tokens lie before shard i, one more than there are shards.

    `complete` once there will be no more. Any number of threads may read while one adds.
    """

    def __init__(self) -> None:
        self.infos: list[ShardInfo] = []
        self.starts = np.zeros(1, np.int64)
        self.complete = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, manifest: Manifest) -> "Shards":
        """Those of a finished cache."""
        shards = cls()
        shards.infos = list(manifest.shards)
        shards.starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)]).astype(np.int64)
        shards.complete = True
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
        """Whoever reads, or waits to, gets `error`."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def follow(self) -> Iterator[ShardInfo]:
        """All shards in order, waiting for those to come. Raises what the builder failed with."""
        number = 0
        while True:
            with self._changed:
                while not (self._error or self.complete or len(self.infos) > number):
                    self._changed.wait()
                if self._error is not None:
                    raise self._error
                if number == len(self.infos):
                    return
                info = self.infos[number]
            yield info
            number += 1

    def wait_for(self, tokens: int | None) -> int:
        """Return once there are so many tokens, or no more to come (None: only then); how many there are.

        Raises what the builder failed with, however much there is already.
        """
        with self._changed:
            while not (self._error or self.complete or (tokens is not None and self.tokens >= tokens)):
                self._changed.wait()
            if self._error is not None:
                raise self._error
            return self.tokens
