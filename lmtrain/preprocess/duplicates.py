"""Documents that occur more than once, by the hashes of their words."""

import os
from collections import Counter
from collections.abc import Sequence

import numpy as np

# Bytes of hashes and places that are in memory at once.
_MEMORY = 1 << 30


class DocumentHashes:
    """Hashes of the documents of many sources, in files of `folder`: memory does not grow with their number."""

    def __init__(self, folder: str):
        self._folder = folder
        self._sizes: dict[int, int] = {}

    def add(self, number: int, hashes: np.ndarray) -> None:
        """Add the documents of source `number`, uint64; documents of hash 0 are no duplicates."""
        self._sizes[number] = len(hashes)
        np.save(self._path(number), hashes)

    def find(self, sources: Sequence[int]) -> tuple[dict[int, np.ndarray], Counter[tuple[int, int]]]:
        """The documents that occurred before, in the order of `sources`, by source: bool [documents].

        Also the number of them by source and by the source of the first occurrence.
        """
        repeated = {number: np.zeros(self._sizes[number], bool) for number in sources}
        starts = np.cumsum([0, *(self._sizes[number] for number in sources)])
        counts: Counter[tuple[int, int]] = Counter()
        parts = max(1, -(-16 * int(starts[-1]) // _MEMORY))
        for part in range(parts):
            hashes, places = self._part(sources, starts, part, parts)
            order = np.argsort(hashes, kind="stable")
            hashes, places = hashes[order], places[order]
            is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
            firsts = places[is_first][np.cumsum(is_first) - 1]
            again, first = places[~is_first], firsts[~is_first]
            owner, of_first = (np.searchsorted(starts, which, side="right") - 1 for which in (again, first))
            for index, number in enumerate(sources):
                repeated[number][again[owner == index] - starts[index]] = True
            pairs, times = np.unique(np.stack([owner, of_first], axis=1), axis=0, return_counts=True)
            for (mine, theirs), count in zip(pairs.tolist(), times.tolist(), strict=True):
                counts[sources[mine], sources[theirs]] += count
        return repeated, counts

    def _part(self, sources: Sequence[int], starts: np.ndarray, part: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of one part of their values, and the number of each document among all."""
        hashes, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for index, number in enumerate(sources):
            values = np.load(self._path(number), mmap_mode="r" if self._sizes[number] else None)
            mine = np.flatnonzero((values != 0) & (values % np.uint64(parts) == part))
            hashes.append(np.asarray(values[mine]))
            places.append(mine + starts[index])
        return np.concatenate(hashes), np.concatenate(places)

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.npy")
