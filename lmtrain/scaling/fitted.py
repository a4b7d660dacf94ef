"""The law of a ladder: its runs checked, fitted, and the fit tested on the largest of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmtrain.runtime.errors import UserError, counted
from lmtrain.scaling.fit import NUM_UNKNOWN, Fit, Interval, fit_law
from lmtrain.scaling.ladder import Ladder
from lmtrain.scaling.results import Result, Results, check

MIN_SIZES = 3
_MIN_POINTS = NUM_UNKNOWN + 1
# An interval of a backtest that is wider than this, as a fraction of the loss, says nothing about the law.
INFORMATIVE = 0.1


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

    @property
    def width(self) -> float:
        """Width of the interval as a fraction of the predicted loss."""
        return (self.interval.high - self.interval.low) / self.predicted

    @property
    def is_informative(self) -> bool:
        return self.width <= INFORMATIVE


@dataclass(frozen=True, kw_only=True)
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
    return FittedLadder(
        ladder=ladder, runs=runs, fit=_fit(runs), backtest=_backtest(runs), missing=len(results.law) - len(runs)
    )


def usable_runs(ladder: Ladder, results: Results, train_tokens: float | None) -> list[Result]:
    """The runs of the law that are done. Raises `UserError` as `fit_ladder`."""
    if not check(results).law:
        left = sum(trial.state not in ("done", "diverged") for trial in results.trials)
        raise UserError(
            f"{ladder.path}: the learning rates have not been tried, {counted(left, 'run')} left; "
            f"run `lmtrain scaling run {ladder.path}`"
        )
    for result in results.law:
        if result.state == "diverged":
            raise UserError(f"{result.point.id} has diverged; add lower learning_rates to the ladder")
    runs = [result for result in results.law if result.state == "done"]
    check_data(ladder, [run.point.tokens for run in runs], train_tokens)
    for found, least, what in (
        ({run.point.parameters for run in runs}, MIN_SIZES, "size"),
        ({run.point.ratio for run in runs}, 2, "ratio"),
        ({run.point.tokens for run in runs}, 3, "number of tokens"),
        (_distinct(runs), _MIN_POINTS, "run"),
    ):
        if len(found) < least:
            raise UserError(
                f"{ladder.path}: {counted(len(found), what)} done, and the law's exponents need {least} or more; "
                f"`lmtrain scaling status {ladder.path}` lists the runs"
            )
    _check_copies(runs)
    return runs


def _distinct(runs: Sequence[Result]) -> set[tuple[int, int]]:
    """N and D of the runs: seeds of a point do not determine the law."""
    return {(run.point.parameters, run.point.tokens) for run in runs}


def _check_copies(runs: Sequence[Result]) -> None:
    """Raise `UserError` for two runs of one N and D with the same loss to the last digit: they show no noise."""
    seen: dict[tuple[int, int, float | None], str] = {}
    for run in runs:
        first = seen.setdefault((run.point.parameters, run.point.tokens, run.loss), run.point.id)
        if first != run.point.id:
            raise UserError(
                f"{first} and {run.point.id} have the same loss of {run.loss}: one log is a copy of the other, or "
                "the seed has no effect; remove one of the two, with its log and checkpoints"
            )


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
        if len(_distinct(kept)) >= _MIN_POINTS and len({run.point.parameters for run in kept}) >= MIN_SIZES:
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
