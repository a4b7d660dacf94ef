"""The plots of a report: one per chart for a single run; for several runs one per metric, with a line per run."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lmtrain.report.charts import CHARTS, MOST_METRICS, Chart, metrics_of
from lmtrain.report.draw import Line, Plot
from lmtrain.report.run import Run

# Plots with more lines than this have smoothed curves without the measured values under them.
_MOST_FAINT = 3


def plan_plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """The plots in the order of the page, and notes about metrics that no plot shows."""
    plots: list[Plot] = []
    left_out = []
    for chart in CHARTS:
        found = metrics_of(chart, [metric for run in runs for metric in run.curves])
        metrics = found[: chart.compared if len(runs) > 1 else MOST_METRICS]
        if len(metrics) < len(found):
            left_out.append(f"{chart.title}: {len(found) - len(metrics):,} more metrics in the log are not plotted.")
        if len(runs) > 1:
            plots += [_comparison(chart, metric, runs, alone=len(found) == 1) for metric in metrics]
        elif metrics:
            plots.append(_single(chart, metrics, runs[0]))
    return _distinct(plots), left_out


def _single(chart: Chart, metrics: Sequence[str], run: Run) -> Plot:
    lines = [Line(metric, run.curves[metric], number) for number, metric in enumerate(metrics)]
    restarts = [(step, None) for step in run.restarts]
    return _plot(chart, chart.name, chart.title, lines, restarts, run.last_step)


def _comparison(chart: Chart, metric: str, runs: Sequence[Run], alone: bool) -> Plot:
    """One metric of all runs. A run has the same colour in every plot. `alone`: the chart has no other metric."""
    shown = [(number, run) for number, run in enumerate(runs) if metric in run.curves]
    lines = [Line(run.name, run.curves[metric], number, number) for number, run in shown]
    restarts = [(step, number) for number, run in shown for step in run.restarts]
    title = chart.title if alone else f"{chart.title}: {metric}"
    name = chart.name if alone else f"{chart.name}-{_slug(metric)}"
    return _plot(chart, name, title, lines, restarts, max(run.last_step for run in runs))


def _plot(
    chart: Chart,
    name: str,
    title: str,
    lines: Sequence[Line],
    restarts: Iterable[tuple[int, int | None]],
    last_step: int,
) -> Plot:
    return Plot(
        name=name,
        title=title,
        unit=chart.unit,
        lines=lines,
        last_step=last_step,
        restarts=list(restarts),
        wide=chart.name == "loss",
        from_zero=chart.from_zero,
        faint=len(lines) <= _MOST_FAINT,
    )


def _slug(metric: str) -> str:
    """A file name made from a metric: lowercase letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", metric.lower()).strip("-")[:80] or "metric"


def _distinct(plots: Sequence[Plot]) -> list[Plot]:
    """Plots with distinct names: different metrics may give the same file name."""
    taken: set[str] = set()
    result = []
    for plot in plots:
        name, number = plot.name, 2
        while name in taken:
            name, number = f"{plot.name}-{number}", number + 1
        taken.add(name)
        result.append(replace(plot, name=name))
    return result
