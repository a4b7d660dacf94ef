"""The main figures of a run."""

import math
from dataclasses import dataclass

from lmtrain.report.charts import DURATION, TOKENS, TOKENS_PER_SECOND
from lmtrain.report.curve import Curve
from lmtrain.report.run import LoggedRun
from lmtrain.report.smooth import smooth
from lmtrain.runtime.progress import format_seconds
from lmtrain.tracking.goodput import STEPS


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
