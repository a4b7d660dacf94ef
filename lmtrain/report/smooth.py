"""What a plot shows of a curve: the trend under the noise, and the range that contains most values."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmtrain.report.curve import Curve

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
