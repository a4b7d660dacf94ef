"""Search for settings of a run on given devices, by compiling candidates or running them on this machine's devices.

Candidates whose state alone does not fit are not compiled. Starting from the first candidate that fits, one setting at
a time is changed, and kept if a step becomes faster: by the bound of the compiled program, or as measured.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import ValidationError

from lmtrain.plan.candidates import MOST_TIME, POLICIES, Changes, alternatives, parallelisms
from lmtrain.plan.request import Plan, Request, ask
from lmtrain.runtime.errors import UserError

# A compile that started before the deadline has at least this timeout, in seconds.
_MIN_TIMEOUT = 30.0
# A change is kept if it saves this share of a step's time, since bounds are not more exact. A change that costs no time
# is kept if it saves this share of memory, which may allow a faster setting.
_MIN_GAIN = 0.01
_MIN_MEMORY_GAIN = 0.1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A compiled candidate: the settings that differ from the config, seconds per step, peak memory in bytes."""

    name: str
    changes: Changes
    seconds: float
    peak: float
    fits: bool
    products: str | None = None
    cycles: float | None = None

    def is_better_than(self, other: "Trial") -> bool:
        if self.products != other.products:  # products in 8 bits have to pay, and else 16 bits are better
            time = self.cycles / other.cycles if self.cycles and other.cycles else self.seconds / other.seconds
            return time <= MOST_TIME if other.products is None else time < 1 / MOST_TIME
        if self.seconds < (1 - _MIN_GAIN) * other.seconds:
            return True
        return self.seconds <= other.seconds and self.peak < (1 - _MIN_MEMORY_GAIN) * other.peak


@dataclass(kw_only=True)
class Search:
    """A search within `capacity` bytes per device, None if unknown; a trial compiles or runs the request's last step.

    `timeout` of one compile in seconds. `eight_bit`: a format of products to try. `report` is called with a line for
    each trial, `progress` with other lines.
    `best`, `trials`, and the counts `too_large` and `untried` are valid at any moment, for example when the user
    interrupts.
    """

    request: Request
    capacity: float | None
    timeout: float
    report: Callable[[str], None] = lambda line: None
    progress: Callable[[str], None] = lambda line: None
    eight_bit: str | None = None
    best: Trial | None = None
    trials: list[Trial] = field(default_factory=list)
    too_large: int = 0
    untried: int = 0
    _seen: set[str] = field(default_factory=set)
    _deadline: float = math.inf

    def run(self, minutes: float) -> None:
        """Try settings until no change is an improvement or the time limit is reached."""
        self._deadline = time.monotonic() + 60 * minutes
        if self._try("the config", {}) is None or self.best is None:
            self._first()
        improved = True
        while improved and self.best is not None:
            before = self.best
            waiting = list(alternatives(self.request, before.changes, self.eight_bit))
            for number, (name, changes) in enumerate(waiting):
                self.untried = len(waiting) - number  # in case it ends here, at the time limit or by an interrupt
                if self._left() <= 0:
                    return
                self._try(name, changes)
            self.untried = 0
            improved = self.best is not before

    def largest_that_fits(self) -> Trial | None:
        """The largest `per_device_parallelism` that fits, smaller than the config's, with more recomputation if
        necessary; None if there is none."""
        now = self.request.run_config
        sizes, written = parallelisms(self.request), now.trainer.per_device_parallelism
        smaller = sizes[1:] if written == -1 else [size for size in sizes if size < written]
        policy = "full" if now.model.gradient_checkpointing is True else now.model.gradient_checkpointing
        largest = self._largest({}, smaller)
        for more in ("full", "offload"):
            if largest is None and POLICIES.index(more) > POLICIES.index(policy):
                largest = self._largest({"model.gradient_checkpointing": more}, sizes)
        return largest

    def _largest(self, changed: Changes, sizes: list[int]) -> Trial | None:
        """The first of the descending `sizes` that fits, by bisection: if one size fits, all smaller ones fit."""
        largest: Trial | None = None
        low, high = 0, len(sizes)
        while low < high:
            middle = (low + high) // 2
            changes = {**changed, "trainer.per_device_parallelism": sizes[middle]}
            name = ", ".join(f"{path.partition('.')[2]} {value}" for path, value in changes.items())
            trial = self._try(name, changes)
            if trial is not None and trial.fits:
                largest, high = trial, middle
            else:
                low = middle + 1
        return largest

    def _first(self) -> None:
        """Find a first candidate that fits: a smaller microbatch, more recomputation, or more parts."""
        if self.largest_that_fits() is not None:
            return
        smallest = {"trainer.per_device_parallelism": 1, "model.gradient_checkpointing": True}
        for name, changes in alternatives(self.request, smallest):
            if self.best is None and name.startswith(("context_axis_size", "model_axis_size")):
                self._try(f"per_device_parallelism 1, gradient_checkpointing true, {name}", changes)

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _try(self, name: str, changes: Changes) -> Trial | None:
        """The trial of a candidate; None if it was tried before, is invalid, too large, or failed."""
        candidate = self.request.changed(changes)
        if candidate.key in self._seen:
            return None
        if self._left() <= 0:
            self.untried = max(self.untried, 1)
            return None
        self._seen.add(candidate.key)
        self.progress(name)
        limit = min(self.timeout, max(self._left(), _MIN_TIMEOUT))
        try:
            state = ask(self.request.changed(changes, compile=False), limit, self.progress)
            if state.fits(self.capacity) is False:
                self.too_large += 1
                return None
            plan = ask(candidate, limit, self.progress)
        except (UserError, ValidationError):
            return None
        products = candidate.run_config.trainer.precision.products
        trial = _trial(name, changes, plan, self.request.steps[-1], self.capacity, products)
        if trial is None:
            why = plan.failure.splitlines()[0] if plan.failure else "no figures"
            self.report(f"  {name}: {why if limit == self.timeout else 'not compiled within --minutes'}")
            return None
        self.trials.append(trial)
        self.report(_line(trial))
        if trial.fits and (self.best is None or trial.is_better_than(self.best)):
            self.best = trial
        return trial


def _trial(
    name: str, changes: Changes, plan: Plan, step: str, capacity: float | None, products: str | None
) -> Trial | None:
    figures = plan.steps.get(step, {})
    if "does_not_fit" in figures:
        return Trial(name=name, changes=changes, seconds=math.inf, peak=math.nan, fits=False)
    if "seconds" not in figures:
        return None
    peak = figures["memory"]["peak"]
    fits = capacity is None or peak <= capacity
    return Trial(
        name=name,
        changes=changes,
        seconds=figures["seconds"]["total"],
        peak=peak,
        fits=fits,
        products=products,
        cycles=figures.get("cycles"),
    )


def _line(trial: Trial) -> str:
    if trial.seconds == math.inf:
        return f"  {trial.name}: does not fit"
    verdict = "" if trial.fits else ", does not fit"
    return f"  {trial.name}: {trial.seconds:.4g} s per step, {trial.peak / 2**30:.2f} GiB{verdict}"
