"""The plots of a report: of one run a plot for each chart, of several a plot for each metric with a line for each."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lmtrain.report.charts import CHARTS, MOST_METRICS, Chart, metrics_of
from lmtrain.report.draw import Line, Plot
from lmtrain.report.run import Run

# More runs than these are drawn without the noise under their smoothed curves.
_MOST_FAINT = 3


def plan_plots(runs: Sequence[Run]) -> tuple[list[Plot], list[str]]:
    """The plots in the order of the page, and what is left out of them."""
    plots: list[Plot] = []
    left_out = []
    for chart in CHARTS:
        found = metrics_of(chart, [metric for run in runs for metric in run.curves])
        metrics = found[: chart.compared if len(runs) > 1 else MOST_METRICS]
        if len(metrics) < len(found):
            left_out.append(
                f"{chart.title}: {len(found) - len(metrics):,} more metrics are in the log, and in no plot."
            )
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
    """Colours belong to runs, so that a run has the same one everywhere. `alone`: no other metric is in the chart."""
    lines = [Line(run.name, run.curves[metric], number) for number, run in enumerate(runs) if metric in run.curves]
    restarts = [(step, number) for number, run in enumerate(runs) for step in run.restarts if metric in run.curves]
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
    """A name for a file, whatever a set is called."""
    return re.sub(r"[^a-z0-9]+", "-", metric.lower()).strip("-")[:80] or "metric"


def _distinct(plots: Sequence[Plot]) -> list[Plot]:
    """Two metrics may make one name."""
    taken: set[str] = set()
    result = []
    for plot in plots:
        name, number = plot.name, 2
        while name in taken:
            name, number = f"{plot.name}-{number}", number + 1
        taken.add(name)
        result.append(replace(plot, name=name))
    return result
