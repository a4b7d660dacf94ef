"""One clock for a run: where its wall time goes. The goodput ledger and the rates of steps both read it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# `HOOKS` is what the host does between two steps: logging and showing them. In the ledger it is a part of `STEPS`,
# as the device computes meanwhile.
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
    """Seconds by section. All time belongs to one: to start-up until `begin_steps`, then to steps, but for what is
    timed with `section`. `clock` gives seconds that never run backwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._base = self._current = START_UP
        self._since = clock()  # up to here all time is in `_seconds`

    def begin_steps(self) -> None:
        """From now on what is not timed is training."""
        self._settle()
        self._base = self._current = STEPS

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """What happens within is of this section; a section within another one counts for the outer."""
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
        """By section, up to now."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        now = self.clock()
        self._seconds[self._current] += max(0.0, now - self._since)
        self._since = now
