"""What of a curve should be seen: the trend under the noise, and the range in which most of it lies."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lmtrain.report.curve import Curve

# Fewer points than these are drawn as they are.
_FEW, _VERY_FEW = 100, 20
_WINDOW = 0.01  # points on either side that a smoothed one is the mean of, as a part of all
_CLOSE = 0.75  # what lies farther from most values than this part of their range is not close to them
_NOISE = 0.01  # part of the visible range: what varies less between neighbours is not noisy


def smooth(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values: the mean of medians, each of 1 % of the points on either side; a lone spike moves nothing.

    Near the beginning of as many after as there are before, so that a steep fall is not drawn late.
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
    """Whether it takes a smoothed curve to see the trend."""
    known = curve.values[np.isfinite(curve.values)]
    if len(known) < _FEW:
        return False
    low, high = visible_range([curve])
    return bool(np.median(np.abs(np.diff(known))) > _NOISE * (high - low))


def visible_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """The lowest and the highest value that a plot should show: without the few that would hide all others.

    The highest 2 % are left out, and the lowest 0.5 %, unless they lie close to the others.
    """
    ranges = []
    for curve in curves:
        known = curve.values[np.isfinite(curve.values)]
        if not len(known):
            continue
        low, high = float(known.min()), float(known.max())
        if len(known) >= _VERY_FEW:
            inner_low, inner_high = (float(value) for value in np.quantile(known, [0.005, 0.98]))
            close = _CLOSE * (inner_high - inner_low)
            low = low if inner_low - low <= close else inner_low
            high = high if high - inner_high <= close else inner_high
        ranges.append((low, high))
    if not ranges:
        return 0.0, 1.0
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    return (low, high) if high > low else (low - abs(low or 1) * 0.05, high + abs(high or 1) * 0.05)
