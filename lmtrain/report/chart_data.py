"""The data of the charts for the page's script: points, the area of each picture, and other x axes than steps."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.report.charts import DURATION, TOKENS, TOKENS_PER_SECOND
from lmtrain.report.draw import Line, Plot, colour_of, dashes_of, unit_of
from lmtrain.report.run import Run
from lmtrain.report.smooth import is_noisy, smooth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS_PER_INCH = 72
_DIGITS = 7


def plot_data(plot: Plot, figure: "Figure") -> dict[str, Any]:
    """A plot: its area (left, top, width, height) in the picture's coordinates, its ranges, its lines and restarts."""
    axes = figure.axes[0]
    (wide, high), place = figure.get_size_inches() * _POINTS_PER_INCH, axes.get_position()
    size, unit = unit_of(plot)
    restarts = [
        {"step": step, "run": owner or 0, "colour": "restart" if owner is None else colour_of(owner)}
        for step, owner in plot.restarts
    ]
    return {
        "name": plot.name,
        "unit": unit,
        "box": _rounded([place.x0 * wide, (1 - place.y1) * high, place.width * wide, place.height * high]),
        # not rounded: the range of a nearly constant curve has equal first digits
        "x": [float(end) for end in axes.get_xlim()],
        "y": [float(end) / size for end in axes.get_ylim()],
        "lines": [_line(line, plot.faint, size) for line in plot.lines],
        "restarts": restarts,
    }


def run_data(run: Run) -> dict[str, Any]:
    """The name of a run, and its tokens and seconds of training by step; None for what its log does not hold."""
    return {"name": run.name, "tokens": _axis(tokens_by_step(run)), "seconds": _axis(seconds_by_step(run))}


def seconds_by_step(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps, and seconds of training up to each: the sum of the durations of steps.

    A log has each step once, so restarts neither add nor repeat time. Steps that are missing from the log count as
    long as the next one in it.
    """
    return None if (found := _known(run, DURATION)) is None else _summed(*found)


def tokens_by_step(run: Run) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps, and tokens up to each: as logged, or the sum of speed times duration; None without either."""
    if (found := _known(run, TOKENS)) is not None:
        steps, tokens = found
        return (np.insert(steps, 0, 0), np.insert(tokens, 0, 0.0)) if steps[0] > 0 else found
    durations, speeds = _known(run, DURATION), _known(run, TOKENS_PER_SECOND)
    if durations is None or speeds is None:
        return None
    steps, seconds = durations
    return _summed(steps, seconds * np.interp(steps, *speeds))


def _known(run: Run, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and means of a metric where it was finite; None if it never was."""
    curve = run.curves.get(metric)
    if curve is None:
        return None
    known = np.isfinite(curve.means)
    steps, means = np.rint(curve.mean_steps[known]).astype(np.int64), curve.means[known]
    return (steps, means) if len(steps) else None


def _summed(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The running sum of values per step, from 0 before the first step that was logged."""
    before = 2 * steps[0] - steps[1] if len(steps) > 1 else steps[0] - 1
    steps = np.insert(steps, 0, max(before, 0))
    return steps, np.insert(np.cumsum(values * np.diff(steps)), 0, 0.0)


def _axis(found: tuple[np.ndarray, np.ndarray] | None) -> dict[str, Any] | None:
    return None if found is None else _series(*found)


def _line(line: Line, faint: bool, size: float) -> dict[str, Any]:
    noisy = is_noisy(line.curve)
    measured = _series(line.curve.steps, line.curve.values / size)
    steps, values = smooth(line.curve) if noisy else (np.empty(0), np.empty(0))
    return {
        "label": line.label,
        "run": line.run,
        "colour": colour_of(line.number),
        "dash": dashes_of(line.number),
        "smoothed": noisy,
        "faint": measured if noisy and faint else None,
        "curve": _series(np.rint(steps).astype(np.int64), values / size) if noisy else measured,
        "bad": line.curve.bad_steps.tolist(),
    }


def _series(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Steps as differences, which are short, and values with seven digits; null for NaN and infinity."""
    return {"steps": np.diff(steps, prepend=0).tolist(), "values": _rounded(values)}


def _rounded(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values]
