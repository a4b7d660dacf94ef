"""The tables of a report: text by row and column, which the page's template turns into markup."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.config.tree import dotted, walk_leaves
from lmtrain.report.charts import CHARTS, DURATION, TIMES, TOKENS, TOKENS_PER_SECOND, metrics_of
from lmtrain.report.curve import Curve, smooth
from lmtrain.report.run import LoggedRun, Samples
from lmtrain.runtime.progress import format_seconds
from lmtrain.tracking.goodput import STEPS, Attempt, lost_steps, total_seconds


@dataclass(frozen=True)
class Cell:
    """A value, a note in small letters, and the name of a colour that a square before the value has."""

    value: str = ""
    note: str = ""
    colour: str = ""


def summarize(run: LoggedRun) -> dict[str, Cell]:
    """The figures of a run by name; unknown ones are empty. All runs have the same names in the same order."""
    trainer = (run.config or {}).get("trainer")
    planned = trainer.get("num_train_steps") if isinstance(trainer, dict) else None
    parameters = run.facts.get("parameter_count")
    tokens = run.curves[TOKENS].last if TOKENS in run.curves else math.nan
    starts = len(run.attempts)
    return {
        "steps done": Cell(f"{run.last_step:,}", f"of {planned:,}" if isinstance(planned, int) else ""),
        "parameters": Cell(_count(parameters) if isinstance(parameters, int) else ""),
        "tokens seen": Cell("" if math.isnan(tokens) else _count(tokens)),
        "last train loss": _train_loss(run.curves.get("train/loss")),
        "best eval loss": _best(run.curves.get("eval/loss")),
        "last eval loss": _last(run.curves.get("eval/loss")),
        "best bits per byte": _best(run.curves.get("eval/bpb")),
        "tokens/s": _median(run.curves.get(TOKENS_PER_SECOND), "{:,.0f}"),
        "MFU": _median(run.curves.get("throughput/mfu"), "{:.1f} %"),
        "wall time": _wall_time(run),
        "goodput": _goodput(run),
        "starts": Cell(f"{starts:,}" if starts else ""),
    }


def format_value(value: float) -> str:
    """Four decimals for values around one, thousands separators for large ones."""
    if not math.isfinite(value):
        return "NaN or infinite"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.01 or value == 0 else f"{value:.3e}"


def _count(number: float) -> str:
    """All digits below a billion; else billions (B) or trillions (T)."""
    if number < 1e9:
        return f"{number:,.0f}"
    return f"{number / 1e9:.4g} B" if number < 1e12 else f"{number / 1e12:,.4g} T"


def _train_loss(curve: Curve | None) -> Cell:
    if curve is None:
        return Cell()
    smoothed = smooth(curve)[1]
    return Cell(format_value(curve.last), f"smoothed {format_value(float(smoothed[-1]))}" if len(smoothed) else "")


def _best(curve: Curve | None) -> Cell:
    if curve is None or curve.lowest is None:
        return Cell()
    step, value = curve.lowest
    return Cell(format_value(value), f"at step {step:,}")


def _last(curve: Curve | None) -> Cell:
    return Cell() if curve is None else Cell(format_value(curve.last), f"at step {curve.last_step:,}")


def _median(curve: Curve | None, text: str) -> Cell:
    return Cell() if curve is None or curve.lowest is None else Cell(text.format(curve.median), "median")


def _wall_time(run: LoggedRun) -> Cell:
    if run.attempts:
        return Cell(format_seconds(max(0.0, run.attempts[-1].updated - run.attempts[0].started)))
    curve = run.curves.get(DURATION)
    return Cell() if curve is None else Cell(format_seconds(curve.sum), "steps only")


def _goodput(run: LoggedRun) -> Cell:
    part = run.fractions.get(STEPS)
    return Cell("" if part is None else f"{100 * part:.1f} %", "of the wall time" if part else "")


NOTHING = "-"
_MAX_SAMPLES = 100  # of a prompt
_OPEN_SAMPLES = 3


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """The first cell of each row is its name. With an empty head, columns have no names."""

    head: Row
    rows: Sequence[Row]


def summaries_table(runs: Sequence[LoggedRun], names: Sequence[Cell]) -> Table:
    """The summary, with a column per run."""
    figures = [summarize(run) for run in runs]
    rows: list[Row] = [
        [name, *(Cell(each[name].value or NOTHING, each[name].note) for each in figures)]
        for name in figures[0]
        if any(each[name].value for each in figures)
    ]
    return Table(["", *names], rows)


def evaluations_table(runs: Sequence[LoggedRun], names: Sequence[Cell]) -> Table | None:
    """Last and best value of every evaluation metric; best is the lowest, of losses only. None if there are none."""
    rows: list[Row] = []
    for chart in (chart for chart in CHARTS if chart.name.startswith("eval-")):
        for metric in metrics_of(chart, [metric for run in runs for metric in run.curves]):
            row: list[Cell | str] = [metric]
            for run in runs:
                curve = run.curves.get(metric)
                last = NOTHING if curve is None else format_value(curve.last)
                step, best = curve.lowest if curve is not None and curve.lowest is not None else (0, math.nan)
                known = math.isfinite(best) and chart.name != "eval-other"
                lowest = f"{format_value(best)} at step {step:,}" if known else NOTHING
                row += [Cell(last, f"best {lowest}")] if len(runs) > 1 else [last, lowest]
            rows.append(row)
    head: Row = ["", *names] if len(runs) > 1 else ["", "last", "best"]
    return Table(head, rows) if rows else None


def times_table(runs: Sequence[LoggedRun], names: Sequence[Cell]) -> Table:
    """Wall time by kind: fractions and durations."""
    rows: list[Row] = []
    for kind, (colour, meaning) in TIMES.items():
        if not any(run.fractions.get(kind) for run in runs):
            continue
        row: list[Cell | str] = [Cell(_words(kind), meaning, colour)]
        for run in runs:
            percent = f"{100 * run.fractions.get(kind, 0.0):.1f} %"
            duration = format_seconds(total_seconds(run.attempts)[kind]) if run.attempts else NOTHING
            row += [Cell(percent, duration)] if len(runs) > 1 else [percent, duration]
        rows.append(row)
    return Table(["", *names] if len(runs) > 1 else ["", "fraction", "duration"], rows)


def attempts_table(attempts: Sequence[Attempt]) -> Table:
    """A row for each start of a run, with the kinds of time that occurred."""
    kinds = [kind for kind in TIMES if any(attempt.seconds.get(kind, 0.0) >= 0.5 for attempt in attempts)]
    rows = [
        [
            f"{number}",
            format_time(attempt.started),
            format_time(attempt.updated),
            f"{attempt.first_step:,}",
            f"{attempt.last_step:,}",
            f"{lost:,}",
            *(format_seconds(attempt.seconds.get(kind, 0.0)) for kind in kinds),
        ]
        for number, (attempt, lost) in enumerate(zip(attempts, lost_steps(attempts), strict=True), start=1)
    ]
    head = ["start", "started", "last update", "from step", "to step", "steps lost", *(_words(kind) for kind in kinds)]
    return Table(head, rows)


def facts_table(run: LoggedRun) -> Table | None:
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
    return Table(["", *(name for name, _ in columns)] if len(columns) > 1 else [], rows)


def differences_table(runs: Sequence[LoggedRun], names: Sequence[Cell]) -> Table | None:
    """The settings that differ between the runs whose config is known; None if that are fewer than two runs."""
    known = [(name, _flat(run.config)) for name, run in zip(names, runs, strict=True) if run.config is not None]
    settings = dict.fromkeys(setting for _, config in known for setting in config)
    rows = [
        [setting, *(config.get(setting, NOTHING) for _, config in known)]
        for setting in settings
        if len({config.get(setting) for _, config in known}) > 1
    ]
    return Table(["", *(name for name, _ in known)], rows) if len(known) > 1 else None


def samples_tables(samples: Samples) -> dict[str, tuple[Table, Table]]:
    """For each prompt a table of its newest texts and one of earlier ones: a row for each step, newest first."""
    tables = {}
    for prompt, texts in samples.items():
        newest = sorted(texts, reverse=True)
        rows = [[f"step {step:,}", texts[step]] for step in newest[:_MAX_SAMPLES]]
        if more := len(newest) - len(rows):
            rows.append(["", f"{more:,} earlier steps are not shown."])
        tables[prompt] = Table([], rows[:_OPEN_SAMPLES]), Table([], rows[_OPEN_SAMPLES:])
    return tables


def format_time(seconds: float) -> str:
    """Local time; seconds for a time outside the calendar."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g}"


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _flat(tree: Any) -> dict[str, str]:
    """Leaves by dotted name, as text in the notation of YAML or JSON."""
    return {dotted(path): _plain(value) for path, value in walk_leaves(tree) if path}


def _plain(value: Any) -> str:
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return f"{value:,}" if type(value) is int and value >= 1_000_000 else str(value)
