"""The tables of a report."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from lmtrain.config.layers import dotted, walk_leaves
from lmtrain.report.charts import CHARTS, metrics_of
from lmtrain.report.html import Markup, element, swatch, table
from lmtrain.report.run import Run
from lmtrain.report.summary import format_value, summarize
from lmtrain.report.theme import TIMES
from lmtrain.runtime.progress import format_seconds
from lmtrain.tracking.goodput import Attempt, lost_steps, total_seconds

NOTHING = "-"


def summaries_table(runs: Sequence[Run], names: Sequence[Markup]) -> Markup:
    """The summary, with a column per run."""
    columns = [summarize(run) for run in runs]
    rows: list[list[str]] = []
    for entries in zip(*columns, strict=True):
        if any(entry.value for entry in entries):
            cells = [_with_note(entry.value or NOTHING, entry.note) for entry in entries]
            rows.append([entries[0].label, *cells])
    return table(["", *names], rows)


def evaluations_table(runs: Sequence[Run], names: Sequence[Markup]) -> Markup | None:
    """Last and best value of every evaluation metric; best is the lowest, of losses only. None if there are none."""
    rows: list[list[str]] = []
    for chart in (chart for chart in CHARTS if chart.name.startswith("eval-")):
        for metric in metrics_of(chart, [metric for run in runs for metric in run.curves]):
            cells: list[str] = []
            for run in runs:
                curve = run.curves.get(metric)
                last = NOTHING if curve is None else format_value(curve.last)
                step, best = curve.lowest if curve is not None and curve.lowest is not None else (0, math.nan)
                known = math.isfinite(best) and chart.name != "eval-other"
                lowest = f"{format_value(best)} at step {step:,}" if known else NOTHING
                cells += [_with_note(last, f"best {lowest}")] if len(runs) > 1 else [last, lowest]
            rows.append([metric, *cells])
    head = ["", *names] if len(runs) > 1 else ["", "last", "best"]
    return table(head, rows) if rows else None


def times_table(runs: Sequence[Run], names: Sequence[Markup]) -> Markup:
    """Wall time by kind: fractions, and durations if there is a ledger."""
    rows: list[list[str]] = []
    for kind in [*TIMES, *{kind for run in runs for kind in run.fractions if kind not in TIMES}]:
        if not any(run.fractions.get(kind) for run in runs):
            continue
        colour, meaning = TIMES.get(kind, ("c7", ""))
        cells: list[str] = []
        for run in runs:
            seconds = total_seconds(run.attempts).get(kind) if run.attempts else None
            cells.append(f"{100 * run.fractions.get(kind, 0.0):.1f} %")
            cells.append(NOTHING if seconds is None else format_seconds(seconds))
        if len(runs) > 1:
            cells = [_with_note(part, duration) for part, duration in zip(cells[::2], cells[1::2], strict=True)]
        rows.append([Markup(swatch(colour) + element("span", _words(kind)) + element("small", f" {meaning}")), *cells])
    return table(["", *names] if len(runs) > 1 else ["", "fraction", "duration"], rows)


def attempts_table(attempts: Sequence[Attempt]) -> Markup:
    """A row for each start of a run, with the kinds of time that occurred."""
    kinds = [kind for kind in TIMES if any(attempt.seconds.get(kind, 0.0) >= 0.5 for attempt in attempts)]
    rows: list[list[str]] = []
    for number, (attempt, lost) in enumerate(zip(attempts, lost_steps(attempts), strict=True), start=1):
        rows.append(
            [
                f"{number}",
                format_time(attempt.started),
                format_time(attempt.updated),
                f"{attempt.first_step:,}",
                f"{attempt.last_step:,}",
                f"{lost:,}",
                *(format_seconds(attempt.seconds.get(kind, 0.0)) for kind in kinds),
            ]
        )
    return table(
        ["start", "started", "last update", "from step", "to step", "steps lost", *(_words(kind) for kind in kinds)],
        rows,
    )


def facts_table(run: Run) -> Markup | None:
    """Versions and devices of a run: a column for each start whose facts differ from those of the one before."""
    columns: list[tuple[str, dict[str, str]]] = []
    for number, attempt in enumerate(run.attempts, start=1):
        facts = _flat(attempt.facts)
        if facts and (not columns or columns[-1][1] != facts):
            columns.append((f"from start {number}", facts))
    logged = _flat(run.facts)
    columns = [(name, logged | facts) for name, facts in columns] or ([("", logged)] if logged else [])
    if not columns:
        return None
    names = dict.fromkeys(name for _, facts in columns for name in facts)
    rows = [[name, *(facts.get(name, NOTHING) for _, facts in columns)] for name in names]
    head = ["", *(name for name, _ in columns)] if len(columns) > 1 else []
    return table(head, rows, class_="text")


def differences_table(runs: Sequence[Run], names: Sequence[Markup]) -> Markup | None:
    """The settings that differ between the runs whose config is known; None if none differ."""
    known = [(name, _flat(run.config)) for name, run in zip(names, runs, strict=True) if run.config is not None]
    settings = dict.fromkeys(setting for _, config in known for setting in config)
    rows = [
        [setting, *(config.get(setting, NOTHING) for _, config in known)]
        for setting in settings
        if len({config.get(setting) for _, config in known}) > 1
    ]
    return table(["", *(name for name, _ in known)], rows, class_="text") if rows else None


def format_time(seconds: float) -> str:
    """Local time; seconds for a time outside the calendar."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g}"


def _with_note(value: str, note: str) -> Markup:
    return Markup(element("span", value) + (element("small", note) if note else ""))


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _flat(tree: Any) -> dict[str, str]:
    """Leaves by dotted name, as text in the notation of YAML or JSON."""
    return {dotted(path): _plain(value) for path, value in walk_leaves(tree) if path}


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if type(value) is int and value >= 1_000_000 else str(value)
