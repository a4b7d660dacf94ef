"""Graceful stop: the first SIGTERM, SIGINT or SIGUSR1 requests a stop, the second one exits immediately.

Slurm sends SIGUSR1 if `--signal` is set; clouds and Kubernetes announce a preemption by SIGTERM. The handlers are set
after `jax.distributed` has started, and replace the SIGTERM handler of JAX's preemption service: several processes
agree on the step to stop after (`lmtrain/train/step/agreement.py`), for any of these signals.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from lmtrain.runtime.logging import log

STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: run the same command again
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StoppedError(Exception):
    """An operation was aborted because a signal requested a stop."""


class StopRequest:
    """Context in which the first signal sets `requested` instead of ending the process, and logs `doing`."""

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
            # deliberately no clean-up: the second signal exits immediately, and files on disk are complete or ignored
            os._exit(STOPPED_BY_SIGNAL)
        self.requested = True
        log.info(f"{signal.Signals(number).name}: {self.doing}; send it again to exit immediately")
