"""The plots of a report: one per chart for a single run; for several runs one per metric, with a line per run."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.report.charts import CHARTS, CURVES, DURATION, MAX_METRICS, TOKENS, Chart, metrics_of
from lmtrain.report.curve import Curve, is_noisy, smooth, visible_range
from lmtrain.report.run import LoggedRun
from lmtrain.runtime.errors import counted

_MAX_FAINT = 3  # plots with more lines have smoothed curves without the measured values under them
_DASHES = [(), (5.0, 2.0), (1.5, 1.5), (6.0, 2.0, 1.5, 2.0)]  # strokes and gaps, in widths of the line; (): solid
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve, its name in the legend, the number of its colour, and the number of its run in the report."""

    label: str
    curve: Curve
    number: int
    run: int = 0

    @property
    def colour(self) -> str:
        """The name of its colour in the theme."""
        return colour_of(self.number)

    @property
    def dashes(self) -> tuple[float, ...]:
        return _DASHES[self.number // len(CURVES) % len(_DASHES)]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot to draw. `name` is the file name without ending.

    `restarts` are steps, each with the number of its run, or None if the plot shows one run.
    """

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    last_step: int
    restarts: Sequence[tuple[int, int | None]] = ()
    wide: bool = False
    from_zero: bool = False

    @property
    def faint(self) -> bool:
        """Whether the measured values are drawn, too, under a smoothed curve."""
        return len(self.lines) <= _MAX_FAINT

    @property
    def scale(self) -> tuple[int, str]:
        """What values are divided by, and the name of that unit: bytes are shown in GiB."""
        return (_GIB, "GiB") if self.unit == "bytes" else (1, self.unit)

    @property
    def y_range(self) -> tuple[float, float]:
        """The lowest and the highest value on the y axis."""
        low, high = visible_range([line.curve for line in self.lines])
        if self.from_zero and low >= 0:
            return 0.0, 1.05 * high
        margin = 0.05 * (high - low)
        return low - margin, high + margin

    @property
    def bad(self) -> int:
        """The number of values that were NaN or infinite."""
        return sum(line.curve.bad for line in self.lines)

    @property
    def note(self) -> str:
        """The highest value, if it is above the plot."""
        highest = [line.curve.highest for line in self.lines if line.curve.highest is not None]
        step, value = max(highest, key=lambda point: point[1], default=(0, -math.inf))
        size, unit = self.scale
        text = f"▲ {format_number(value / size)}{f' {unit}' if size > 1 else ''} at step {step:,}"
        return text if value > self.y_range[1] else ""


def colour_of(number: int) -> str:
    """The name of the colour of line or run `number` in the theme."""
    return CURVES[number % len(CURVES)]


def format_number(value: float) -> str:
    """A number on an axis."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def choose_plots(runs: Sequence[LoggedRun]) -> tuple[list[Plot], list[str]]:
    """The plots in the order of the page, and notes about metrics that no plot shows."""
    plots: dict[str, Plot] = {}
    notes = []
    for chart in CHARTS:
        every = metrics_of(chart, [metric for run in runs for metric in run.curves])
        metrics = every[: chart.compared if len(runs) > 1 else MAX_METRICS]
        if len(metrics) < len(every):
            notes.append(f"{chart.title}: {counted(len(every) - len(metrics), 'more metric')} in the log, not plotted.")
        if len(runs) == 1 and metrics:
            lines = [
                Line(label=metric, curve=runs[0].curves[metric], number=number) for number, metric in enumerate(metrics)
            ]
            plots[chart.name] = _plot(chart, runs, chart.name, chart.title, lines)
        elif len(every) == 1:
            plots[chart.name] = _plot(chart, runs, chart.name, chart.title, _line_per_run(metrics[0], runs))
        else:
            for metric in metrics:
                name = _distinct(f"{chart.name}-{_slug(metric)}", plots)
                plots[name] = _plot(chart, runs, name, f"{chart.title}: {metric}", _line_per_run(metric, runs))
    return list(plots.values()), notes


def _line_per_run(metric: str, runs: Sequence[LoggedRun]) -> list[Line]:
    """One metric of all runs that have it. A run has the same colour in every plot."""
    return [
        Line(label=run.name, curve=run.curves[metric], number=number, run=number)
        for number, run in enumerate(runs)
        if metric in run.curves
    ]


def _plot(chart: Chart, runs: Sequence[LoggedRun], name: str, title: str, lines: Sequence[Line]) -> Plot:
    shown = dict.fromkeys(line.run for line in lines)
    return Plot(
        name=name,
        title=title,
        unit=chart.unit,
        lines=lines,
        last_step=max(run.last_step for run in runs),
        restarts=[(step, number if len(runs) > 1 else None) for number in shown for step in runs[number].restarts],
        wide=chart.name == "loss",
        from_zero=chart.from_zero,
    )


def _slug(metric: str) -> str:
    """A file name made from a metric: lowercase letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", metric.lower()).strip("-")[:80] or "metric"


def _distinct(name: str, taken: dict[str, Plot]) -> str:
    """`name`, with a number if it is taken: different metrics may give the same file name."""
    numbered = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbered if each not in taken)


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
