"""Checks for stop requests during long work between two steps."""

from lmtrain.runtime.distributed import gather
from lmtrain.runtime.processes import Processes
from lmtrain.runtime.signals import StoppedError, StopRequest

# Several processes exchange stop requests at every N-th check.
_INTERVAL = 16


class StopCheck:
    """A check for stop requests during long work between two steps: call it repeatedly, equally often in all processes.

    Raises `StoppedError` in all processes at the same call if one received a signal. A single process checks at every
    call, several at every sixteenth, through the coordinator.
    """

    def __init__(self, processes: Processes, stop: StopRequest):
        self._processes = processes
        self._stop = stop
        self._calls = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._processes.count > 1 and self._calls % _INTERVAL:
            return
        if any(gather(self._processes, "stop", self._stop.requested)):
            raise StoppedError
