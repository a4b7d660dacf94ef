"""Batch size of each step in sequences, and the index of its first sequence: a prefix sum over a run's phases."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes by phase. `phases` are (first step, sequences per step), ascending from step 0; the last has no end.

    >>> sizes = BatchSizes.of([(0, 2), (10, 4)])
    >>> sizes.at(9), sizes.at(10), sizes.before(11)
    (2, 4, 24)
    """

    phases: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: int | Sequence[tuple[int, int]]) -> "BatchSizes":
        """From one size for all steps, or from pairs of (first step, size)."""
        return cls(((0, sizes),) if isinstance(sizes, int) else tuple(sizes))

    @property
    def all(self) -> list[int]:
        """All distinct sizes, ascending."""
        return sorted({size for _, size in self.phases})

    def at(self, step: int) -> int:
        """Batch size of step `step`, counted from 0."""
        return self.phases[bisect_right(self._starts, step) - 1][1]

    def before(self, step: int) -> int:
        """Number of sequences in all steps before `step`, which is the index of its first sequence."""
        ends = [*self._starts[1:], step]
        return sum(max(0, min(end, step) - start) * size for (start, size), end in zip(self.phases, ends, strict=True))

    def whole_steps(self, sequences: int) -> int:
        """Number of complete steps that `sequences` sequences fill."""
        steps = 0
        for (start, size), end in zip(self.phases, [*self._starts[1:], None], strict=True):
            fit = max(0, sequences - self.before(start)) // size
            if end is None or fit < end - start:
                return start + fit
            steps = end
        return steps

    @property
    def _starts(self) -> list[int]:
        return [start for start, _ in self.phases]
