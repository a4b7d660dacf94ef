"""Goodput: how the wall time of a run is spent, over all its starts, and how much of it is productive training.

The ledger is `<log_dir>/<run_id>/goodput.json`: one entry per start of the run, with seconds by kind. It is written
regularly, so the entry of a killed start lacks only its last ten seconds or so.
"""

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import write_atomically

# `HOOKS` is the host's work between two steps: logging and displaying them. In the ledger it is a part of `STEPS`,
# since the device computes at the same time.
START_UP, RESTORE, COMPILE, DATA, STEPS, EVALUATION, SAVING, HOOKS = SECTIONS = (
    "start_up",
    "restore",
    "compile",
    "data_wait",
    "steps",
    "evaluation",
    "save_blocking",
    "hooks",
)


class Timer:
    """Seconds by section. All time belongs to one section: to start-up until `begin_steps`, then to steps, except for
    code in `section`. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._base = self._current = START_UP
        self._since = clock()  # time up to here is in `_seconds`

    def begin_steps(self) -> None:
        """From now on, time outside of `section` counts as steps."""
        self._settle()
        self._base = self._current = STEPS

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the time of this context for a section; nested sections count for the outer one."""
        if self._current != self._base:
            yield
            return
        self._settle()
        self._current = name
        try:
            yield
        finally:
            self._settle()
            self._current = self._base

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by section, up to now."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        now = self.clock()
        self._seconds[self._current] += max(0.0, now - self._since)
        self._since = now


NAME = "goodput.json"

# Measured kinds of time: the timer's sections; hooks count as steps.
KINDS = tuple(section for section in SECTIONS if section != HOOKS)
# Kinds known only later: steps that a later start repeated, and the time between two starts.
LOST, DOWN = "lost", "down"

_SECONDS_BETWEEN_WRITES = 10.0


_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Steps = Annotated[int, Field(ge=0)]


@dataclass(kw_only=True)
class Attempt:
    """One start of a run. Times are seconds since 1970, `seconds` by kind; steps are updates done."""

    started: _Number
    updated: _Number
    first_step: _Steps
    last_step: _Steps
    seconds: dict[str, _Number] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


_LEDGER = TypeAdapter(dict[Literal["attempts"], list[Attempt]])


class Ledger:
    """The ledger, with an entry for this start from the times of `timer`. Call `begin_steps` when the loop starts.

    `began` is the start time of the process, by the clock `wall` in seconds since 1970. With `folder` None nothing is
    written: for all processes of a run except the first.
    """

    def __init__(
        self, folder: str | None, timer: Timer, began: float | None = None, wall: Callable[[], float] = time.time
    ):
        self._timer, self._wall = timer, wall
        self._path = None if folder is None else os.path.join(folder, NAME)
        self._earlier = [] if self._path is None else read_attempts(self._path)
        now = wall()
        began = now if began is None else began
        # time of the process before the timer was created
        self._before = max(0.0, now - began - timer.seconds[START_UP])
        self._attempt = Attempt(
            started=began, updated=now, first_step=0, last_step=0, seconds=dict.fromkeys(KINDS, 0.0)
        )
        self._written = timer.clock()

    def begin_steps(self, first_step: int, facts: Mapping[str, Any]) -> None:
        """Record that training starts after `first_step` updates. `facts` describe the hardware and versions."""
        self._timer.begin_steps()
        self._attempt.first_step = self._attempt.last_step = first_step
        self._attempt.facts = dict(facts)
        self.write()

    def step_done(self, step: int) -> dict[str, float]:
        """Record `step` updates. About every ten seconds, write the ledger and return its metrics, else nothing."""
        self._attempt.last_step = step
        if self._timer.clock() - self._written < _SECONDS_BETWEEN_WRITES:
            return {}
        self.write()
        return self.metrics()

    def metrics(self) -> dict[str, float]:
        """`goodput/<kind>`: the fraction of the wall time since the run was first started."""
        self._book()
        seconds = total_seconds([*self._earlier, self._attempt])
        total = sum(seconds.values()) or 1.0
        return {f"goodput/{kind}": value / total for kind, value in seconds.items()}

    def write(self) -> None:
        """Write the ledger to its file; after an error it is not written again."""
        self._book()
        self._written, self._attempt.updated = self._timer.clock(), self._wall()
        if self._path is None:
            return
        attempts = [asdict(attempt) for attempt in (*self._earlier, self._attempt)]
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)  # it may have been removed during the run
            write_atomically(self._path, json.dumps({"attempts": attempts}, indent=1).encode(), durable=False)
        except OSError as error:
            log.warning(f"{self._path} cannot be written, goodput is no longer recorded: {error.strerror or error}")
            self._path = None

    def _book(self) -> None:
        seconds = self._timer.seconds
        seconds[STEPS] += seconds.pop(HOOKS)
        seconds[START_UP] += self._before
        self._attempt.seconds = seconds


def read_attempts(path: str) -> list[Attempt]:
    """The entries of a ledger, the oldest first; none if the ledger is missing or invalid."""
    try:
        with open(path, "rb") as file:
            return _LEDGER.validate_json(file.read())["attempts"]
    except (OSError, ValidationError):
        return []


def total_seconds(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Seconds of an entire run by kind: all of `KINDS`, `lost` and `down`.

    Steps after the one that a later start resumed from are lost; they count as the same fraction of the start's step
    time. Down is the time from the last update of a start to the beginning of the next.
    """
    seconds = {kind: sum(attempt.seconds.get(kind, 0.0) for attempt in attempts) for kind in KINDS}
    seconds |= {LOST: 0.0, DOWN: 0.0}
    for attempt, lost in zip(attempts, lost_steps(attempts), strict=True):
        if lost:
            again = attempt.seconds.get(STEPS, 0.0) * lost / (attempt.last_step - attempt.first_step)
            seconds[STEPS] -= again
            seconds[LOST] += again
    for attempt, after in itertools.pairwise(attempts):
        seconds[DOWN] += max(0.0, after.started - attempt.updated)
    return seconds


def lost_steps(attempts: Sequence[Attempt]) -> list[int]:
    """Number of steps of each start that a later one repeated."""
    lost: list[int] = []
    kept: float = math.inf  # the earliest step that any later start resumed from
    for attempt in reversed(attempts):
        lost.append(int(min(max(0, attempt.last_step - kept), attempt.last_step - attempt.first_step)))
        kept = min(kept, attempt.first_step)
    return lost[::-1]
