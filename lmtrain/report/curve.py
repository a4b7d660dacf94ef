"""The values of one metric over the steps, thinned so that a log of any length fits into memory and a plot."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BLOCKS = 2048

RULE = (
    f"Runs of more than {MOST_BLOCKS:,} steps are cut into at most that number of blocks of equal length (a power of "
    "two). The smallest and the largest value of each block are drawn; smoothed curves and medians use its mean."
)


@dataclass(frozen=True)
class Curve:
    """A thinned metric. Steps ascend; values are NaN where a block has no finite value."""

    steps: np.ndarray  # with `values`: the extremes of each block
    values: np.ndarray
    mean_steps: np.ndarray  # with `means`: one per block
    means: np.ndarray
    bad_steps: np.ndarray  # where values were NaN or infinite, null in a log
    bad: int  # number of values that were NaN or infinite
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
    """Collects the values of a metric and keeps a bounded number of them; see `RULE`.

    For speed the reader appends to `steps` and `values` directly, and then calls `fold` now and then.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._width = 1
        self._of = _empty(MOST_BLOCKS)
        self._last = (0, math.nan)

    def fold(self) -> None:
        """Merge the appended values into the blocks."""
        if not self.steps:
            return
        steps, values = np.array(self.steps, np.int64), np.array(self.values, np.float64)
        self._last = (self.steps[-1], self.values[-1])
        self.steps.clear()
        self.values.clear()
        while steps.max() >= self._width * MOST_BLOCKS:
            self._widen()
        finite, of = np.isfinite(values), self._of
        np.add.at(of["bad"], steps[~finite] // self._width, 1)
        steps, values = steps[finite], values[finite]
        at = steps // self._width
        np.add.at(of["count"], at, 1)
        np.add.at(of["sum"], at, values)
        np.add.at(of["step_sum"], at, steps)
        for extreme, sign in (("low", 1.0), ("high", -1.0)):
            order = np.argsort(-sign * values, kind="stable")  # the last assignment wins: the extreme
            new = np.full(MOST_BLOCKS, sign * math.inf)
            new_step = np.zeros(MOST_BLOCKS, np.int64)
            new[at[order]], new_step[at[order]] = values[order], steps[order]
            better = sign * new < sign * of[extreme]
            of[extreme] = np.where(better, new, of[extreme])
            of[f"{extreme}_step"] = np.where(better, new_step, of[f"{extreme}_step"])

    def curve(self) -> Curve:
        self.fold()
        first_steps = np.arange(MOST_BLOCKS) * self._width
        used = (self._of["count"] > 0) | (self._of["bad"] > 0)
        first_steps = first_steps[used]
        of = {name: column[used] for name, column in self._of.items()}
        known = of["count"] > 0
        count = np.maximum(of["count"], 1)
        mean_steps = np.where(known, of["step_sum"] / count, first_steps)
        means = np.where(known, of["sum"] / count, math.nan)
        # the two extremes of a block in their order in the log; one point if they are equal
        first_is_low = of["low_step"] <= of["high_step"]
        pairs = [
            (np.where(first_is_low, of["low_step"], of["high_step"]), np.where(first_is_low, of["low"], of["high"])),
            (np.where(first_is_low, of["high_step"], of["low_step"]), np.where(first_is_low, of["high"], of["low"])),
        ]
        steps = np.stack([np.where(known, step, first_steps) for step, _ in pairs], 1).ravel()
        values = np.stack([np.where(known, value, math.nan) for _, value in pairs], 1).ravel()
        distinct = np.ones(len(steps), bool)
        distinct[1::2] = known & (of["low_step"] != of["high_step"])
        lowest = _extreme(of, "low", known, np.argmin)
        highest = _extreme(of, "high", known, np.argmax)
        bad_steps = first_steps[of["bad"] > 0]
        total, bad = float(of["sum"].sum()), int(of["bad"].sum())
        last_step, last = self._last
        last = last if math.isfinite(last) else math.nan
        steps, values = steps[distinct], values[distinct]
        return Curve(steps, values, mean_steps, means, bad_steps, bad, last_step, last, total, lowest, highest)

    def _widen(self) -> None:
        """Double the length of the blocks: merge each two."""
        old, half = self._of, MOST_BLOCKS // 2
        self._of = _empty(MOST_BLOCKS)
        for name in ("count", "bad", "sum", "step_sum"):
            self._of[name][:half] = old[name].reshape(half, 2).sum(1)
        for extreme, best in (("low", np.argmin), ("high", np.argmax)):
            pairs, steps = old[extreme].reshape(half, 2), old[f"{extreme}_step"].reshape(half, 2)
            which = best(pairs, axis=1)[:, None]
            self._of[extreme][:half] = np.take_along_axis(pairs, which, 1)[:, 0]
            self._of[f"{extreme}_step"][:half] = np.take_along_axis(steps, which, 1)[:, 0]
        self._width *= 2


def _empty(size: int) -> dict[str, np.ndarray]:
    integers = {name: np.zeros(size, np.int64) for name in ("count", "bad", "low_step", "high_step")}
    floats = {"sum": 0.0, "step_sum": 0.0, "low": math.inf, "high": -math.inf}
    return integers | {name: np.full(size, value) for name, value in floats.items()}


def _extreme(of: dict[str, np.ndarray], name: str, known: np.ndarray, best: Any) -> tuple[int, float] | None:
    if not known.any():
        return None
    at = best(of[name])
    return int(of[f"{name}_step"][at]), float(of[name][at])
