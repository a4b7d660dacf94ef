"""The main figures of a run."""

import math
from dataclasses import dataclass

from lmtrain.report.charts import TOKENS
from lmtrain.report.run import Run
from lmtrain.report.smooth import smooth
from lmtrain.runtime.progress import format_seconds
from lmtrain.tracking.goodput import STEPS


@dataclass(frozen=True)
class Entry:
    """A figure, and a note about it."""

    label: str
    value: str
    note: str = ""


def summarize(run: Run) -> list[Entry]:
    """The figures of a run; unknown ones are empty. All runs have the same entries in the same order."""
    return [
        _steps(run),
        Entry("parameters", _parameters(run)),
        _tokens(run),
        _train_loss(run),
        _best(run, "best eval loss", "eval/loss"),
        _last(run, "last eval loss", "eval/loss"),
        _best(run, "best bits per byte", "eval/bpb"),
        _median(run, "tokens/s", "throughput/tokens_per_second"),
        _median(run, "MFU", "throughput/mfu"),
        _wall_time(run),
        _goodput(run),
        _starts(run),
    ]


def format_value(value: float) -> str:
    """Four decimals for values around one, thousands separators for large ones."""
    if not math.isfinite(value):
        return "NaN or infinite"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.01 or value == 0 else f"{value:.3e}"


def _steps(run: Run) -> Entry:
    trainer = (run.config or {}).get("trainer")
    planned = trainer.get("num_train_steps") if isinstance(trainer, dict) else None
    return Entry("steps done", f"{run.last_step:,}", f"of {planned:,}" if isinstance(planned, int) else "")


def _parameters(run: Run) -> str:
    found = run.facts.get("parameter_count")
    return _count(found) if isinstance(found, int) else ""


def _tokens(run: Run) -> Entry:
    curve = run.curves.get(TOKENS)
    return Entry("tokens seen", "" if curve is None or math.isnan(curve.last) else _count(curve.last))


def _count(number: float) -> str:
    """All digits below a billion; else billions (B) or trillions (T)."""
    if number < 1e9:
        return f"{number:,.0f}"
    return f"{number / 1e9:.4g} B" if number < 1e12 else f"{number / 1e12:,.4g} T"


def _train_loss(run: Run) -> Entry:
    curve = run.curves.get("train/loss")
    if curve is None:
        return Entry("last train loss", "")
    smoothed = smooth(curve)[1]
    note = f"smoothed {format_value(float(smoothed[-1]))}" if len(smoothed) else ""
    return Entry("last train loss", format_value(curve.last), note)


def _best(run: Run, label: str, metric: str) -> Entry:
    curve = run.curves.get(metric)
    if curve is None or curve.lowest is None:
        return Entry(label, "")
    step, value = curve.lowest
    return Entry(label, format_value(value), f"at step {step:,}")


def _last(run: Run, label: str, metric: str) -> Entry:
    curve = run.curves.get(metric)
    return Entry(label, "") if curve is None else Entry(label, format_value(curve.last), f"at step {curve.last_step:,}")


def _median(run: Run, label: str, metric: str) -> Entry:
    curve = run.curves.get(metric)
    if curve is None or not math.isfinite(curve.median):
        return Entry(label, "")
    value = f"{curve.median:.1f} %" if label == "MFU" else f"{curve.median:,.0f}"
    return Entry(label, value, "median")


def _wall_time(run: Run) -> Entry:
    if run.attempts:
        return Entry("wall time", format_seconds(max(0.0, run.attempts[-1].updated - run.attempts[0].started)))
    curve = run.curves.get("throughput/duration")
    return Entry("wall time", format_seconds(curve.sum), "steps only") if curve else Entry("wall time", "")


def _goodput(run: Run) -> Entry:
    part = run.fractions.get(STEPS)
    return Entry("goodput", "" if part is None else f"{100 * part:.1f} %", "of the wall time" if part else "")


def _starts(run: Run) -> Entry:
    number = len(run.attempts)
    return Entry("starts", f"{number:,}" if number else "")
