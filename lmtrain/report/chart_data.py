"""The data of the charts for the page's script: points, ranges, and other x axes than steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lmtrain.report.charts import DURATION, TOKENS
from lmtrain.report.plots import Line, Plot, colour_of
from lmtrain.report.run import LoggedRun
from lmtrain.report.smooth import is_noisy, smooth

_DIGITS = 7

Series = tuple[np.ndarray, np.ndarray]  # steps and values


def plot_data(plot: Plot) -> dict[str, Any]:
    """A plot: its unit, its range of values, its lines and restarts."""
    size, unit = plot.scale
    return {
        "wide": plot.wide,
        "unit": unit,
        "last_step": plot.last_step,
        # not rounded: the range of a nearly constant curve has equal first digits
        "y": [end / size for end in plot.y_range],
        "lines": [_line(line, plot.faint, size) for line in plot.lines],
        "restarts": [
            {"step": step, "run": owner or 0, "colour": "restart" if owner is None else colour_of(owner)}
            for step, owner in plot.restarts
        ],
    }


def run_data(run: LoggedRun) -> dict[str, Any]:
    """The name of a run, and its tokens and seconds of training by step; None for what its log does not hold."""
    axes = {"tokens": tokens_by_step(run), "seconds": seconds_by_step(run)}
    return {"name": run.name, **{name: None if axis is None else _stored(*axis) for name, axis in axes.items()}}


def seconds_by_step(run: LoggedRun) -> Series | None:
    """Steps, and seconds of training up to each: the sum of the durations of steps.

    A log has each step once, so restarts neither add nor repeat time. Steps that are missing from the log count as
    long as the next one in it.
    """
    durations = _known(run, DURATION)
    if durations is None:
        return None
    steps, seconds = durations
    before = 2 * steps[0] - steps[1] if len(steps) > 1 else steps[0] - 1
    steps = np.insert(steps, 0, max(before, 0))
    return steps, np.insert(np.cumsum(seconds * np.diff(steps)), 0, 0.0)


def tokens_by_step(run: LoggedRun) -> Series | None:
    """Steps, and tokens up to each, from 0."""
    tokens = _known(run, TOKENS)
    return None if tokens is None else (np.insert(tokens[0], 0, 0), np.insert(tokens[1], 0, 0.0))


def _known(run: LoggedRun, metric: str) -> Series | None:
    """Steps and means of a metric where it was finite; None if it never was."""
    curve = run.curves.get(metric)
    if curve is None or curve.lowest is None:
        return None
    known = np.isfinite(curve.means)
    return np.rint(curve.mean_steps[known]).astype(np.int64), curve.means[known]


def _line(line: Line, faint: bool, size: float) -> dict[str, Any]:
    noisy = is_noisy(line.curve)
    measured = _stored(line.curve.steps, line.curve.values / size)
    steps, values = smooth(line.curve) if noisy else (line.curve.steps, line.curve.values)
    return {
        "label": line.label,
        "run": line.run,
        "colour": line.colour,
        "dash": " ".join(f"{1.5 * part:g}" for part in line.dashes) or "none",
        "smoothed": noisy,
        "faint": measured if noisy and faint else None,
        "curve": _stored(np.rint(steps).astype(np.int64), values / size),
        "bad": line.curve.bad_steps.tolist(),
    }


def _stored(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Steps as differences, which are short, and values with seven digits; null for NaN and infinity."""
    return {"steps": np.diff(steps, prepend=0).tolist(), "values": _rounded(values)}


def _rounded(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [float(f"{value:.{_DIGITS}g}") if np.isfinite(value) else None for value in values]
