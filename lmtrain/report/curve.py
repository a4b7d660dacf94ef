"""The values of one metric over the steps, thinned out so that a log of any length fits into memory and a picture."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_STRETCHES = 2048

RULE = (
    f"A run of more than {MOST_STRETCHES:,} steps is cut into stretches of as many steps (a power of two) as it takes: "
    "of each, the smallest and the largest value are drawn, and the mean goes into smoothed curves and medians."
)


@dataclass(frozen=True)
class Curve:
    """What is left of a metric. Steps ascend; values are NaN where nothing in a stretch was a finite number."""

    steps: np.ndarray  # with `values`: the extremes of every stretch
    values: np.ndarray
    mean_steps: np.ndarray  # with `means`: one of every stretch
    means: np.ndarray
    bad_steps: np.ndarray  # where values were NaN or infinite, which a log says as null
    bad: int  # how many they were
    last_step: int
    last: float  # NaN if it was not finite
    sum: float
    lowest: tuple[int, float] | None  # (step, value); None if nothing was finite
    highest: tuple[int, float] | None

    @property
    def median(self) -> float:
        known = self.means[np.isfinite(self.means)]
        return float(np.median(known)) if known.size else math.nan


class Thinner:
    """Takes the values of a metric and keeps a bounded number; see `RULE`.

    `steps` and `values` are appended to by the reader, for speed, which then calls `fold` every so often.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._width = 1
        self._of = _empty(MOST_STRETCHES)
        self._last = (0, math.nan)

    def fold(self) -> None:
        """Book what was appended."""
        if not self.steps:
            return
        steps, values = np.array(self.steps, np.int64), np.array(self.values, np.float64)
        self._last = (self.steps[-1], self.values[-1])
        self.steps.clear()
        self.values.clear()
        while steps.max() >= self._width * MOST_STRETCHES:
            self._widen()
        finite, of = np.isfinite(values), self._of
        np.add.at(of["bad"], steps[~finite] // self._width, 1)
        steps, values = steps[finite], values[finite]
        at = steps // self._width
        np.add.at(of["count"], at, 1)
        np.add.at(of["sum"], at, values)
        np.add.at(of["step_sum"], at, steps)
        for extreme, sign in (("low", 1.0), ("high", -1.0)):
            order = np.argsort(-sign * values, kind="stable")  # what is assigned last stays: the extreme
            new = np.full(MOST_STRETCHES, sign * math.inf)
            new_step = np.zeros(MOST_STRETCHES, np.int64)
            new[at[order]], new_step[at[order]] = values[order], steps[order]
            better = sign * new < sign * of[extreme]
            of[extreme] = np.where(better, new, of[extreme])
            of[f"{extreme}_step"] = np.where(better, new_step, of[f"{extreme}_step"])

    def curve(self) -> Curve:
        self.fold()
        begin = np.arange(MOST_STRETCHES) * self._width
        there = (self._of["count"] > 0) | (self._of["bad"] > 0)
        of = {name: column[there] for name, column in self._of.items()}
        known = of["count"] > 0
        count = np.maximum(of["count"], 1)
        mean_steps = np.where(known, of["step_sum"] / count, begin[there])
        means = np.where(known, of["sum"] / count, math.nan)
        # the two extremes of a stretch in the order they came in; one point if they are one
        first_is_low = of["low_step"] <= of["high_step"]
        pairs = [
            (np.where(first_is_low, of["low_step"], of["high_step"]), np.where(first_is_low, of["low"], of["high"])),
            (np.where(first_is_low, of["high_step"], of["low_step"]), np.where(first_is_low, of["high"], of["low"])),
        ]
        steps = np.stack([np.where(known, step, begin[there]) for step, _ in pairs], 1).ravel()
        values = np.stack([np.where(known, value, math.nan) for _, value in pairs], 1).ravel()
        distinct = np.ones(len(steps), bool)
        distinct[1::2] = known & (of["low_step"] != of["high_step"])
        lowest = _extreme(of, "low", known, np.argmin)
        highest = _extreme(of, "high", known, np.argmax)
        bad_steps = begin[there][of["bad"] > 0]
        total, bad = float(of["sum"].sum()), int(of["bad"].sum())
        last_step, last = self._last
        last = last if math.isfinite(last) else math.nan
        steps, values = steps[distinct], values[distinct]
        return Curve(steps, values, mean_steps, means, bad_steps, bad, last_step, last, total, lowest, highest)

    def _widen(self) -> None:
        """Stretches of twice as many steps: each two become one."""
        old, half = self._of, MOST_STRETCHES // 2
        self._of = _empty(MOST_STRETCHES)
        for name in ("count", "bad", "sum", "step_sum"):
            self._of[name][:half] = old[name].reshape(half, 2).sum(1)
        for extreme, best in (("low", np.argmin), ("high", np.argmax)):
            pairs, steps = old[extreme].reshape(half, 2), old[f"{extreme}_step"].reshape(half, 2)
            which = best(pairs, axis=1)[:, None]
            self._of[extreme][:half] = np.take_along_axis(pairs, which, 1)[:, 0]
            self._of[f"{extreme}_step"][:half] = np.take_along_axis(steps, which, 1)[:, 0]
        self._width *= 2


def _empty(size: int) -> dict[str, np.ndarray]:
    whole = {name: np.zeros(size, np.int64) for name in ("count", "bad", "low_step", "high_step")}
    real = {"sum": 0.0, "step_sum": 0.0, "low": math.inf, "high": -math.inf}
    return whole | {name: np.full(size, value) for name, value in real.items()}


def _extreme(of: dict[str, np.ndarray], name: str, known: np.ndarray, best: Any) -> tuple[int, float] | None:
    if not known.any():
        return None
    at = best(of[name])
    return int(of[f"{name}_step"][at]), float(of[name][at])
