"""Ladders, fits and predictions as text and as JSON."""

import math
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from lmtrain.runtime.errors import counted
from lmtrain.runtime.redact import redact
from lmtrain.scaling.fit import Interval
from lmtrain.scaling.fitted import INFORMATIVE, MIN_SIZES, FittedLadder
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.predict import Best, Prediction, Speed
from lmtrain.scaling.results import Result, Results, stages

_OUTLIER = 10  # times the median residual

_UNKNOWNS = {
    "E": "the loss that no size and no data falls below",
    "A": "of the number of parameters N",
    "alpha": "exponent of N",
    "B": "of the number of tokens D",
    "beta": "exponent of D",
}


def status_lines(ladder: Ladder, results: Results) -> Iterator[str]:
    """A table of all runs, and what is left."""
    rows: list[tuple[str, ...]] = [("run", "N", "D", "D / N", "rate", "seed", "state", "loss")]
    rows += [_row(result) for result in results.all]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        cells = [
            f"{cell:<{width}}" if column in (0, 6) else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)
    yield from (f"{r.point.id}: {'; '.join(r.differences)}" for r in results.all if r.differences)
    yield ""
    if len(ladder.sizes) < MIN_SIZES:
        yield few_sizes(ladder)
    yield from rate_lines(ladder, results)
    left = [point for stage in stages(results) for point in stage]
    if all(result.state == "not started" for result in results.all):
        yield redact(f"no run has a log in {ladder.run.trainer.log_dir}")
    more = "" if results.law else ", and those of the law once the learning rates have been tried"
    flops = sum(point.flops for point in left)
    yield f"left: {counted(len(left), 'run')}, {flops:.3g} FLOPs{more}" if left or more else "complete"


def few_sizes(ladder: Ladder) -> str:
    """That a ladder has too few sizes."""
    return f"{counted(len(ladder.sizes), 'size')}: no law can be fitted to fewer than {MIN_SIZES}"


def _row(result: Result) -> tuple[str, ...]:
    point = result.point
    loss = f"{result.loss:.4f}" if result.state == "done" else ""
    cells = f"{point.parameters:,}", f"{point.tokens:,}", f"{point.ratio:g}", f"{point.rate:g}", str(point.seed)
    return (point.id, *cells, result.state, loss)


def rate_lines(ladder: Ladder, results: Results) -> Iterator[str]:
    """The best learning rate of each size that has tried all, with a warning if it is the first or the last one."""
    if len(ladder.rates) == 1:
        yield f"learning rate: {ladder.rates[0]:g}, the only one; learning_rates of the ladder tries others"
    for number, size in enumerate(ladder.sizes):
        ended = [r for r in results.trials if r.point.size == number and r.state in ("done", "diverged")]
        losses = {r.point.rate: r.loss for r in ended if r.loss is not None}
        if not losses or len(losses) < len(ladder.rates):
            continue
        best = min(losses, key=lambda rate: losses[rate])
        tried = ", ".join(
            f"{rate:g}: {'diverged' if loss == math.inf else f'{loss:.4f}'}" for rate, loss in losses.items()
        )
        edge = {
            ladder.rates[0]: "; it is the lowest tried, add lower ones to learning_rates",
            ladder.rates[-1]: "; it is the highest tried, add higher ones to learning_rates",
        }
        yield f"learning rate of {size.label}: {best:g} ({tried}){edge.get(best, '')}"


def fit_lines(fitted: FittedLadder) -> Iterator[str]:
    """The law with its intervals, its noise, and the backtest."""
    ladder, runs, fit = fitted.ladder, fitted.runs, fitted.fit
    sizes = sorted({run.point.parameters for run in runs})
    tokens = [run.point.tokens for run in runs]
    yield (
        f"{ladder.name}: {counted(len(runs), 'run')} of {len(sizes)} sizes, N {count(sizes[0])} to {count(sizes[-1])}, "
        f"D {count(min(tokens))} to {count(max(tokens))}"
    )
    if fitted.missing:
        yield f"left out, as they are not done: {counted(fitted.missing, 'run')}"
    if unchecked := sum(not run.is_checked for run in runs):
        yield f"not checked, as their log folder has no config.yaml: the settings of {counted(unchecked, 'run')}"
    yield "L(N, D) = E + A / N^alpha + B / D^beta, in nats per token; intervals of 95 %"
    for name, meaning in _UNKNOWNS.items():
        value, (low, high) = getattr(fit.law, name), fit.interval(name)
        note = "NOT IDENTIFIED by these runs" if name in fit.unidentified else meaning
        if name in fit.at_bounds:
            note = f"NOT IDENTIFIED: at its bound of {fit.at_bounds[name]:g}"
        yield f"  {name:<6}{value:>10.4g}   {low:>9.4g} to {high:<9.4g} {note}"
    yield f"noise     {100 * fit.noise:.2g} % of the loss of one run ({fit.degrees} degrees of freedom)"
    sizes_of_residuals = [abs(float(residual)) for residual in fit.residuals]
    largest, run = max(zip(sizes_of_residuals, (run.point.id for run in runs), strict=True))
    is_outlier = largest > max(_OUTLIER * median(sizes_of_residuals), 0.01)
    note = f"; an outlier, which may have diverged: `lmtrain report {run}` shows its loss" if is_outlier else ""
    yield f"residuals {100 * largest:.2g} % at most, of {run}{note}"
    yield from _backtest_lines(fitted)


def _backtest_lines(fitted: FittedLadder) -> Iterator[str]:
    if not fitted.backtest:
        yield "backtest  not possible: without the largest run, too few are left for a fit; add a size"
        return
    names = ", ".join(dict.fromkeys(fitted.ladder.sizes[test.result.point.size].label for test in fitted.backtest))
    runs, informative = len(fitted.backtest), [test for test in fitted.backtest if test.is_informative]
    covered = sum(test.is_covered for test in informative)
    verdict = f"{covered} of {runs} in the interval of 95 %"
    if len(informative) < runs:
        wide = f"wider than {100 * INFORMATIVE:g} % of the loss"
        verdict += f", {runs - len(informative)} NOT INFORMATIVE, with intervals {wide}"
    yield f"backtest  a fit without {counted(runs, 'run')} of {names} predicts them; {verdict}"
    for test in fitted.backtest:
        yield (
            f"  {test.result.point.id}: {test.predicted:.4f} ({interval_text(test.interval)}, width "
            f"{100 * test.width:.3g} %) instead of {test.result.loss:.4f}, {100 * test.error:+.2f} %"
        )


def prediction_lines(prediction: Prediction) -> Iterator[str]:
    """The predicted loss of a run, and how far it is from the ladder."""
    p = prediction
    ratio = p.tokens / p.parameters
    yield f"run       N {count(p.parameters)}, D {count(p.tokens)} ({ratio:.3g} per parameter), {p.flops:.3g} FLOPs"
    yield (
        f"beyond    the ladder's largest run by {p.size_factor:.3g} x in N, {p.token_factor:.3g} x in D, "
        f"{p.flops_factor:.3g} x in FLOPs"
    )
    far = "; far outside the ladder: a direction, not a prediction" if p.is_far else ""
    yield f"loss      {p.loss:.4f} ({interval_text(p.interval)} with 95 %){far}"


def effect_lines(effects: Sequence[str]) -> Iterator[str]:
    """What the law does not know about a run."""
    if effects:
        yield "the law does not know the effect of:"
        yield from (f"  {effect}" for effect in effects)


def cost_line(flops: float, speed: Speed) -> str:
    """The time of a run on its devices."""
    hours = speed.hours(flops)
    return (
        f"cost      {hours * speed.devices:,.4g} device hours, {duration(hours)} on {speed.devices} x {speed.device}: "
        f"{speed.flops_per_second:.3g} FLOP/s each, {speed.source}"
    )


def best_lines(best: Best, speed: Speed, hours: float) -> Iterator[str]:
    """The best run for a budget."""
    (low, high), (least, most) = best.range, best.interval
    yield (
        f"budget    {speed.devices} x {speed.device} for {hours:g} h: {speed.flops(hours):.3g} FLOPs; the best N is "
        f"{count(best.parameters)} ({count(least)} to {count(most)} with 95 %), and from {count(low)} to {count(high)} "
        "the loss is within 0.1 %"
    )
    yield from prediction_lines(best.prediction)


def fit_json(fitted: FittedLadder) -> dict[str, Any]:
    """The law, its intervals and the backtest."""
    fit = fitted.fit
    return {
        "runs": len(fitted.runs),
        "missing": fitted.missing,
        "law": {name: getattr(fit.law, name) for name in _UNKNOWNS},
        "intervals": {name: list(fit.interval(name)) for name in _UNKNOWNS},
        "unidentified": fit.unidentified,
        "at_bounds": dict(fit.at_bounds),
        "noise": fit.noise,
        "residuals": {run.point.id: float(value) for run, value in zip(fitted.runs, fit.residuals, strict=True)},
        "backtest": {
            test.result.point.id: {
                "predicted": test.predicted,
                "interval": list(test.interval),
                "loss": test.result.loss,
                "width": test.width,
                "informative": test.is_informative,
            }
            for test in fitted.backtest
        },
    }


def status_json(results: Results) -> list[dict[str, Any]]:
    """One object for each run."""
    names = ("id", "parameters", "tokens", "ratio", "seed", "rate", "steps")
    return [
        {
            **{name: getattr(result.point, name) for name in names},
            "state": result.state,
            "loss": result.loss if result.state == "done" else None,
            "step": result.step,
        }
        for result in results.all
    ]


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction."""
    names = ("parameters", "tokens", "flops", "loss", "size_factor", "token_factor", "flops_factor")
    others = {"interval": list(prediction.interval), "far": prediction.is_far}
    return {name: getattr(prediction, name) for name in names} | others


def count(number: float) -> str:
    """A number with a unit: 1.23 M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def interval_text(interval: Interval) -> str:
    """`3.1 to 3.2`."""
    return f"{interval.low:.4f} to {interval.high:.4f}"


def duration(hours: float) -> str:
    """Hours, or days if they are many."""
    return f"{hours / 24:,.1f} days" if hours > 72 else f"{hours:,.3g} h" if hours >= 1 else f"{60 * hours:,.3g} min"
