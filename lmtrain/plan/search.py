"""Search for settings of a run on given devices, by compiling candidates or running them on this machine's devices.

The memory estimate excludes candidates that cannot fit. Starting from the first candidate that fits, one setting at a
time is changed, and kept if a step becomes faster: by the bound of the compiled program, or as measured.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from lmtrain.config.errors import UserError
from lmtrain.plan.answers import Answer, ask
from lmtrain.plan.candidates import POLICIES, Changes, alternatives, parallelisms
from lmtrain.plan.request import Request

# A candidate is tried although its estimate exceeds the memory by up to this factor: estimates may be too high.
_MARGIN = 1.15
# A compile that started before the deadline has at least this timeout, in seconds.
_LEAST_SECONDS = 30.0
# A change is kept if it saves this share of a step's time, since bounds are not more exact. A change that costs no time
# is kept if it saves this share of memory, which may allow a faster setting.
_LEAST_GAIN = 0.01
_LEAST_MEMORY = 0.1


@dataclass(frozen=True)
class Trial:
    """A compiled candidate: the settings that differ from the config, seconds per step, peak memory."""

    name: str
    changes: Changes
    seconds: float
    peak: float
    fits: bool


@dataclass
class Search:
    """The results so far; valid at any moment, for example when the user interrupts."""

    best: Trial | None = None
    trials: list[Trial] = field(default_factory=list)
    too_large: int = 0
    untried: int = 0


def find_settings(
    request: Request,
    capacity: float | None,
    minutes: float,
    timeout: float,
    report: Callable[[str], None],
    progress: Callable[[str], None],
    found: Search,
) -> Search:
    """Fill `found` until no change is an improvement or the time limit is reached.

    `report` is called with a line for each trial. A candidate compiles or runs the last of the request's steps.
    """
    deadline = time.monotonic() + 60 * minutes
    seen: set[str] = set()

    def left() -> float:
        return deadline - time.monotonic()

    def estimate(changes: Changes) -> float | None:
        try:
            answer = ask(request.changed(changes, compile=False), timeout, progress)
        except (UserError, ValidationError):
            return None
        return float(answer.estimate["estimate"]["total"])

    def attempt(name: str, changes: Changes) -> Trial | None:
        candidate = request.changed(changes)
        if candidate.key in seen:
            return None
        seen.add(candidate.key)
        if capacity is not None:
            needed = estimate(changes)
            if needed is None:
                return None
            if needed > _MARGIN * capacity:
                found.too_large += 1
                return None
        if left() <= 0:
            found.untried = max(found.untried, 1)
            return None
        try:
            limit = min(timeout, max(left(), _LEAST_SECONDS))
            answer = ask(candidate, limit, progress)
        except (UserError, ValidationError):
            return None
        trial = _trial(name, changes, answer, request.steps[-1], capacity)
        if trial is None:
            why = answer.failure.splitlines()[0] if answer.failure else "no figures"
            report(f"  {name}: {why if limit == timeout else 'not compiled within --minutes'}")
            return None
        found.trials.append(trial)
        report(_line(trial))
        if trial.fits and (found.best is None or _is_better(trial, found.best)):
            found.best = trial
        return trial

    for name, changes in _firsts(request):
        attempt(name, changes)
        if found.best is not None or left() <= 0:
            break
    improved = True
    while improved and found.best is not None:
        before = found.best
        waiting = list(alternatives(request, before.changes))
        for number, (name, changes) in enumerate(waiting):
            found.untried = len(waiting) - number  # in case it ends here, at the time limit or by an interrupt
            if left() <= 0:
                return found
            attempt(name, changes)
        found.untried = 0
        improved = found.best is not before
    return found


def first_that_fits(
    request: Request, capacity: float | None, timeout: float, progress: Callable[[str], None]
) -> Trial | None:
    """The largest `per_device_parallelism` that fits, by compiling, with more recomputation if necessary; or None."""
    now = request.run_config
    written = now.trainer.per_device_parallelism
    sizes = parallelisms(request)
    sizes = sizes[1:] if written == -1 else [size for size in sizes if size < written]
    first = "full" if now.model.gradient_checkpointing is True else now.model.gradient_checkpointing
    policies = [first, *(more for more in ("full", "offload") if POLICIES.index(more) > POLICIES.index(first))]
    for policy in policies:
        changed = {} if policy == policies[0] else {"model.gradient_checkpointing": policy}
        options = sizes if policy == policies[0] else parallelisms(request)
        found = _largest(request, changed, options, capacity, timeout, progress)
        if found is not None:
            return found
    return None


def _largest(
    request: Request,
    changed: Changes,
    sizes: list[int],
    capacity: float | None,
    timeout: float,
    progress: Callable[[str], None],
) -> Trial | None:
    """The first of the descending `sizes` that fits, by bisection: if one size fits, all smaller ones fit."""
    best: Trial | None = None
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        changes = {**changed, "trainer.per_device_parallelism": sizes[middle]}
        name = ", ".join(f"{path.partition('.')[2]} {value}" for path, value in changes.items())
        progress(name)
        answer = ask(request.changed(changes), timeout, progress)
        trial = _trial(name, changes, answer, "train", capacity)
        if trial is not None and trial.fits:
            best, high = trial, middle
        else:
            low = middle + 1
    return best


def _firsts(request: Request) -> Iterator[tuple[str, Changes]]:
    """Initial candidates: the unchanged config, then settings with decreasing memory."""
    yield "the config", {}
    sizes = parallelisms(request)
    config = request.run_config
    now = config.trainer.per_device_parallelism
    for size in [size for size in sizes if now == -1 or size < now]:
        yield f"per_device_parallelism {size}", {"trainer.per_device_parallelism": size}
    smallest: Mapping[str, Any] = {"trainer.per_device_parallelism": 1, "model.gradient_checkpointing": True}
    yield "per_device_parallelism 1, gradient_checkpointing true", smallest
    yield (
        "per_device_parallelism 1, gradient_checkpointing offload",
        {**smallest, "model.gradient_checkpointing": "offload"},
    )
    for name, changes in alternatives(request, smallest):
        if name.startswith("model_axis_size"):
            yield f"per_device_parallelism 1, gradient_checkpointing true, {name}", changes


def _trial(name: str, changes: Changes, answer: Answer, step: str, capacity: float | None) -> Trial | None:
    figures = answer.steps.get(step)
    if figures is None:
        return None
    if "does_not_fit" in figures:
        return Trial(name, changes, float("inf"), float("nan"), False)
    seconds = figures["seconds"]["total"] if "seconds" in figures else None
    if seconds is None:
        return None
    peak = figures["memory"]["peak"]
    return Trial(name, changes, seconds, peak, capacity is None or peak <= capacity)


def _is_better(trial: Trial, best: Trial) -> bool:
    if trial.seconds < (1 - _LEAST_GAIN) * best.seconds:
        return True
    return trial.seconds <= best.seconds and trial.peak < (1 - _LEAST_MEMORY) * best.peak


def _line(trial: Trial) -> str:
    if trial.seconds == float("inf"):
        return f"  {trial.name}: does not fit"
    verdict = "" if trial.fits else ", does not fit"
    return f"  {trial.name}: {trial.seconds:.4g} s per step, {trial.peak / 2**30:.2f} GiB{verdict}"
