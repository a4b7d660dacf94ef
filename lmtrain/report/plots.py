"""The plots of a report: one per chart for a single run; for several runs one per metric, with a line per run."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.config.counts import counted
from lmtrain.report.charts import CHARTS, MAX_METRICS, Chart, metrics_of
from lmtrain.report.curve import Curve
from lmtrain.report.run import LoggedRun
from lmtrain.report.smooth import visible_range
from lmtrain.report.theme import CURVES

_MAX_FAINT = 3  # plots with more lines have smoothed curves without the measured values under them
_DASHES = [(), (5.0, 2.0), (1.5, 1.5), (6.0, 2.0, 1.5, 2.0)]  # strokes and gaps, in widths of the line; (): solid
_GIB = 2**30


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
            lines = [Line(metric, runs[0].curves[metric], number) for number, metric in enumerate(metrics)]
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
        Line(run.name, run.curves[metric], number, number) for number, run in enumerate(runs) if metric in run.curves
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
