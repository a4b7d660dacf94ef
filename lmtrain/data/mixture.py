"""Which source each example of a mixture comes from: exact shares in every block, a pure function of its index.

Examples are taken in blocks of 2048. In each block every source has its share of places, rounded by largest remainder,
and a keyed permutation of the block says where. A place is the next example of its source, so that the same example
index always is the same example, whatever came before a restart. Where the weights change, a new sequence of blocks
begins.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.data.permutation import permute

BLOCK = 2048


@dataclass(frozen=True)
class Phase:
    """From example `start` on, the sources have these shares (any scale)."""

    start: int
    weights: tuple[float, ...]


class Mixture:
    """`source_of(index)` gives, for global example numbers, the source of each and its number within that source."""

    def __init__(self, phases: Sequence[Phase], seed: int):
        assert phases[0].start == 0
        self._seed = seed
        self._starts = np.array([phase.start for phase in phases], np.int64)
        self._counts = [block_counts(phase.weights) for phase in phases]
        self._before = [np.zeros(len(phases[0].weights), np.int64)]
        for number in range(len(phases) - 1):
            self._before.append(self._before[number] + self._taken(number, int(np.diff(self._starts)[number])))
        self._block = functools.lru_cache(64)(self._make_block)

    def source_of(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`index` int64 [rows] -> sources int64 [rows], and numbers int64 [rows] counted from 0 in each source."""
        phases = np.searchsorted(self._starts, index, side="right") - 1
        sources, numbers = np.empty_like(index), np.empty_like(index)
        for row, (at, phase) in enumerate(zip(index.tolist(), phases.tolist(), strict=True)):
            block, place = divmod(at - int(self._starts[phase]), BLOCK)
            source, rank = (int(part[place]) for part in self._block(phase, block))
            sources[row] = source
            numbers[row] = self._before[phase][source] + block * self._counts[phase][source] + rank
        return sources, numbers

    def examples_within(self, limits: Sequence[int], most: int) -> int:
        """How many examples, at most `most`, there are before one source would give more than its limit."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            phase = int(np.searchsorted(self._starts, middle - 1, side="right")) - 1
            given = self._before[phase] + self._taken(phase, middle - int(self._starts[phase]))
            low, high = (middle, high) if (given <= np.array(limits)).all() else (low, middle - 1)
        return low

    def _taken(self, phase: int, examples: int) -> np.ndarray:
        """How many examples of each source the first `examples` of a phase hold."""
        whole, rest = divmod(examples, BLOCK)
        sources, _ = self._make_block(phase, whole)
        return whole * self._counts[phase] + np.bincount(sources[:rest], minlength=len(self._counts[phase]))

    def _make_block(self, phase: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each place of a block its source, and how many places before it in the block have the same one."""
        counts = self._counts[phase]
        key = np.full(BLOCK, phase * 2**40 + block, np.int64)
        order = permute(np.arange(BLOCK), BLOCK, self._seed, key)
        sources = np.repeat(np.arange(len(counts)), counts)[order]
        ranks = np.empty(BLOCK, np.int64)
        for source in range(len(counts)):
            places = sources == source
            ranks[places] = np.arange(int(places.sum()))
        return sources, ranks


def block_counts(weights: Sequence[float]) -> np.ndarray:
    """Places of each source in a block: its share rounded down, the rest to those with the largest remainders."""
    shares = np.array(weights, np.float64) / np.sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    largest_first = np.argsort(counts - shares, kind="stable")
    counts[largest_first[: BLOCK - int(counts.sum())]] += 1
    return counts
