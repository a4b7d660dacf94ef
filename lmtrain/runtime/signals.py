"""Stopping in an orderly way: the first SIGTERM or SIGINT asks, the second ends the process at once."""

import os
import signal
from types import FrameType, TracebackType

from lmtrain.runtime.logging import log

STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: run the same command again


class StoppedError(Exception):
    """Something was ended because the process was asked to stop."""


class StopRequest:
    """While entered, SIGTERM and SIGINT set `requested` instead of ending the process. `doing` says what follows."""

    def __init__(self, doing: str = "finishing this step and saving") -> None:
        self.requested = False
        self.doing = doing
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned, it takes

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # no clean-up on purpose: a second signal means now, and what is on disk is complete or invisible
            os._exit(STOPPED_BY_SIGNAL)
        self.requested = True
        log.info(f"{signal.Signals(number).name}: {self.doing}; once more ends at once")
