"""The values of one metric over the steps, smoothed, and thinned so that a plot of a log of any length is small."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_BLOCKS = 2048

RULE = (
    f"Runs of more than {MAX_BLOCKS:,} steps are cut into at most that number of blocks of equal length (a power of "
    "two). The smallest and the largest value of each block are drawn; smoothed curves and medians use its mean."
)


@dataclass(frozen=True, kw_only=True)
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


_MIN_SMOOTHED = 100  # a curve with fewer points is not smoothed
_MIN_CUT = 20  # a curve with fewer points is visible with all of them
_WINDOW = 0.01  # points on each side of a smoothed one, as a fraction of all points
_CLOSE = 0.75  # values farther from most others than this fraction of their range are outliers
_NOISE = 0.01  # a curve whose neighbours differ less, as a fraction of the visible range, is not noisy


def smooth(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a smoothed curve: the mean of medians, each over 1 % of the points on each side.

    A single outlier has no effect. Near the start the window is symmetric and smaller, so that a steep fall is not
    drawn late.
    """
    known = np.isfinite(curve.means)
    steps, means = curve.mean_steps[known], curve.means[known]
    reach = max(1, round(len(means) * _WINDOW))
    return steps, _filter(_filter(means, reach, np.median), reach, np.mean)


def _filter(values: np.ndarray, reach: int, of: Callable[..., Any]) -> np.ndarray:
    number, window = len(values), 2 * reach + 1
    if number <= window:
        return np.array([of(values[at - min(at, reach) : 2 * at + 1]) for at in range(number)])
    begin = [of(values[: 2 * at + 1]) for at in range(reach)]
    end = [of(values[at - reach :]) for at in range(number - reach, number)]
    return np.concatenate([begin, of(np.lib.stride_tricks.sliding_window_view(values, window), axis=-1), end])


def is_noisy(curve: Curve) -> bool:
    """Whether the trend is visible only in a smoothed curve."""
    known = curve.values[np.isfinite(curve.values)]
    if len(known) < _MIN_SMOOTHED:
        return False
    low, high = visible_range([curve])
    return bool(np.median(np.abs(np.diff(known))) > _NOISE * (high - low))


def visible_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The lowest and the highest value that a plot shows, without outliers.

    The highest 2 % and the lowest 0.5 % are left out unless they are close to the others.
    """
    ranges = []
    for curve in curves:
        known = curve.values[np.isfinite(curve.values)]
        if not len(known):
            continue
        low, high = float(known.min()), float(known.max())
        if len(known) >= _MIN_CUT:
            inner_low, inner_high = (float(value) for value in np.quantile(known, [0.005, 0.98]))
            close = _CLOSE * (inner_high - inner_low)
            low = low if inner_low - low <= close else inner_low
            high = high if high - inner_high <= close else inner_high
        ranges.append((low, high))
    if not ranges:
        return 0.0, 1.0
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    return (low, high) if high > low else (low - abs(low or 1) * 0.05, high + abs(high or 1) * 0.05)
