"""The law of a ladder: its runs checked, fitted, and the fit tested on the largest of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.scaling.fit import NUM_UNKNOWN, Fit, fit_law
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.law import Interval
from lmtrain.scaling.results import Result, Results, check

_MIN_RUNS = NUM_UNKNOWN + 1


@dataclass(frozen=True)
class Tested:
    """A run that was left out of a fit, and what that fit predicted."""

    result: Result
    predicted: float
    interval: Interval

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        assert self.result.loss is not None
        return self.predicted / self.result.loss - 1

    @property
    def is_covered(self) -> bool:
        return self.result.loss in self.interval


@dataclass(frozen=True)
class FittedLadder:
    """The runs of a ladder that the law was fitted to, the fit, and the backtest; `missing` runs are not done yet."""

    ladder: Ladder
    runs: Sequence[Result]
    fit: Fit
    backtest: Sequence[Tested]
    missing: int

    @property
    def largest(self) -> Result:
        """The run with the most FLOPs."""
        return max(self.runs, key=lambda run: run.point.flops_per_token * run.point.tokens)


def fit_ladder(ladder: Ladder, results: Results, train_tokens: float | None) -> FittedLadder:
    """Fit the law to the runs that are done. `train_tokens`: tokens of the training data; None if unknown.

    Raises `UserError` for runs that one law does not describe, or that do not determine its exponents.
    """
    runs = usable_runs(ladder, results, train_tokens)
    return FittedLadder(ladder, runs, _fit(runs), _backtest(runs), len(results.law) - len(runs))


def usable_runs(ladder: Ladder, results: Results, train_tokens: float | None) -> list[Result]:
    """The runs of the law that are done. Raises `UserError` as `fit_ladder`."""
    if not results.law:
        left = sum(trial.state not in ("done", "diverged") for trial in results.trials)
        raise UserError(
            f"{ladder.path}: the learning rates have not been tried, {counted(left, 'run')} left; "
            f"run `lmtrain scaling run {ladder.path}`"
        )
    for result in check(results).law:
        if result.state == "diverged":
            raise UserError(f"{result.point.id} has diverged; add lower learning_rates to the ladder")
    runs = [result for result in results.law if result.state == "done"]
    check_data(ladder, [run.point.tokens for run in runs], train_tokens)
    sizes, ratios = ({getattr(run.point, name) for run in runs} for name in ("size", "ratio"))
    for found, least, what in (
        (sizes, 3, "size"),
        (ratios, 2, "ratio"),
        (runs, _MIN_RUNS, "run"),
    ):
        if len(found) < least:
            raise UserError(
                f"{ladder.path}: {counted(len(found), what)} done, and the law's exponents need {least} or more; "
                f"`lmtrain scaling status {ladder.path}` lists the runs"
            )
    return runs


def check_data(ladder: Ladder, tokens: Sequence[int], train_tokens: float | None) -> None:
    """Raise `UserError` if a run reads data more than once."""
    longest = max(tokens, default=0)
    if train_tokens is not None and longest > train_tokens:
        raise UserError(
            f"{ladder.path}: the longest run reads {longest:,} tokens, {longest / train_tokens:.2f} times the training "
            "data, and the law is for new data only; decrease sizes or tokens_per_parameter, or add text"
        )


def _fit(runs: Sequence[Result]) -> Fit:
    points = [run.point for run in runs]
    losses = [run.loss for run in runs if run.loss is not None]
    return fit_law([point.parameters for point in points], [point.tokens for point in points], losses)


def _backtest(runs: Sequence[Result]) -> list[Tested]:
    """Predict the largest runs from the others: those of the largest size, or else the one with the most FLOPs; none
    if the rest is too little for a fit."""
    largest = max(run.point.size for run in runs)
    most = max(run.point.flops_per_token * run.point.tokens for run in runs)
    for is_out in (
        lambda run: run.point.size == largest,
        lambda run: run.point.flops_per_token * run.point.tokens == most,
    ):
        kept, out = [run for run in runs if not is_out(run)], [run for run in runs if is_out(run)]
        if len(kept) >= _MIN_RUNS and len({run.point.size for run in kept}) >= 3:
            fit = _fit(kept)
            return [
                Tested(
                    run,
                    fit.law.loss(run.point.parameters, run.point.tokens),
                    fit.laws.interval(run.point.parameters, run.point.tokens),
                )
                for run in out
            ]
    return []
