"""Stopping in an orderly way: the first SIGTERM, SIGINT or SIGUSR1 asks, the second ends the process at once.

Slurm sends SIGUSR1 where `--signal` asks for it; clouds and Kubernetes announce the end of a machine by SIGTERM. Set
after the processes of a run have met, these handlers take the place of the one that JAX's preemption service set for
SIGTERM: a run of several processes agrees with its steps (`lmtrain/train/step/agreement.py`), whichever signal it was.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from lmtrain.runtime.logging import log

STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: run the same command again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StoppedError(Exception):
    """Something was ended because the process was asked to stop."""


class StopRequest:
    """While entered, these signals set `requested` instead of ending the process. `doing` says what follows."""

    def __init__(self, doing: str = "finishing this step and saving") -> None:
        self.requested = False
        self.doing = doing
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # no clean-up on purpose: a second signal means now, and what is on disk is complete or invisible
            os._exit(STOPPED_BY_SIGNAL)
        self.requested = True
        log.info(f"{signal.Signals(number).name}: {self.doing}; send it again to exit immediately")
