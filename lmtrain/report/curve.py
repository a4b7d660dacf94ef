"""The values of one metric over the steps, thinned so that a plot of a log of any length is small."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_BLOCKS = 2048

RULE = (
    f"Runs of more than {MAX_BLOCKS:,} steps are cut into at most that number of blocks of equal length (a power of "
    "two). The smallest and the largest value of each block are drawn; smoothed curves and medians use its mean."
)


@dataclass(frozen=True)
class Curve:
    """A thinned metric. Steps ascend; values are NaN where a block has no finite value."""

    steps: np.ndarray  # with `values`: the extremes of each block
    values: np.ndarray
    mean_steps: np.ndarray  # with `means`: one per block
    means: np.ndarray
    bad_steps: np.ndarray  # where values were NaN or infinite, null in a log; at most one per block
    bad: int  # number of values that were NaN or infinite
    last_step: int
    last: float  # NaN if it was not finite
    sum: float

    @property
    def median(self) -> float:
        known = self.means[np.isfinite(self.means)]
        return float(np.median(known)) if known.size else math.nan

    @property
    def lowest(self) -> tuple[int, float] | None:
        """Step and value; None if nothing was finite."""
        return None if np.isnan(self.values).all() else self._point(int(np.nanargmin(self.values)))

    @property
    def highest(self) -> tuple[int, float] | None:
        """Step and value; None if nothing was finite."""
        return None if np.isnan(self.values).all() else self._point(int(np.nanargmax(self.values)))

    def _point(self, index: int) -> tuple[int, float]:
        return int(self.steps[index]), float(self.values[index])


def thin(all_steps: Sequence[int], all_values: Sequence[float]) -> Curve:
    """Thin the values of a metric, of which there is at least one; see `RULE`."""
    order = np.argsort(all_steps, kind="stable")
    steps, values = np.asarray(all_steps, np.int64)[order], np.asarray(all_values, np.float64)[order]
    finite = np.isfinite(values)
    values = np.where(finite, values, math.nan)
    width = 1
    while steps[-1] >= width * MAX_BLOCKS:
        width *= 2
    block = steps // width
    starts = np.unique(block, return_index=True)[1]
    counts = np.add.reduceat(finite.astype(np.int64), starts)
    sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: a block without a finite value
        means = sums / counts
        mean_steps = np.add.reduceat(np.where(finite, steps, 0), starts) / counts
    by_value = np.lexsort((values, block))  # ascending within each block, NaN last
    extremes = np.unique([by_value[starts], by_value[starts + np.maximum(counts, 1) - 1]])
    bad_steps = steps[~finite]
    return Curve(
        steps=steps[extremes],
        values=values[extremes],
        mean_steps=np.where(counts > 0, mean_steps, steps[starts]),
        means=means,
        bad_steps=bad_steps[np.unique(bad_steps // width, return_index=True)[1]],
        bad=len(bad_steps),
        last_step=int(steps[-1]),
        last=float(values[-1]),
        sum=float(sums.sum()),
    )
