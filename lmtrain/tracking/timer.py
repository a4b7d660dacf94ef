"""One clock for the wall time of a run, used by the goodput ledger and by throughput."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
