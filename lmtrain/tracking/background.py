"""Runs a tracker in its own thread, so that a slow or failing service does not affect training."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from lmtrain.runtime.logging import log
from lmtrain.tracking.tracker import Tracker

_QUEUE_SIZE = 1000
# Calls that take longer are logged as a warning.
_HANGING_SECONDS = 60.0


class BackgroundTracker:
    """A tracker that is called in its own thread. Its first error is logged; after that it gets no more calls.

    A hanging call is logged once. Calls that do not fit in the queue are dropped, logged and counted.
    """

    finish_seconds = 30.0

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]):
        self._name = name
        self._open = open_tracker
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(_QUEUE_SIZE)
        self._dropped = 0
        self._busy_since: float | None = None  # start time of the running call, None if there is none
        self._warned_hanging = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._started = False
        self._failed = False

    def call(self, verb: str, *arguments: Any) -> None:
        """Call this method of the tracker in the background."""
        if verb == "log":
            self._start()  # not before: trackers' libraries import slowly, and by now the first step is done
        if self._failed:
            return
        self._warn_if_hanging()
        try:
            self._calls.put_nowait((verb, arguments))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    f"tracker {self._name}: too slow, its queue is full and calls are dropped; training continues"
                )

    def finish(self) -> None:
        """Wait for the queued calls, at most `finish_seconds` in total."""
        self._start()
        deadline = time.monotonic() + self.finish_seconds
        with contextlib.suppress(queue.Full):
            self._calls.put(("finish", ()), timeout=self.finish_seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning(f"tracker {self._name}: still busy after {self.finish_seconds:.0f} s; abandoned")
        if self._dropped:
            log.warning(f"tracker {self._name}: too slow, {self._dropped} calls were dropped; the JSON log has them")

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def _warn_if_hanging(self) -> None:
        since = self._busy_since
        if since is not None and not self._warned_hanging and time.monotonic() - since > _HANGING_SECONDS:
            self._warned_hanging = True
            log.warning(f"tracker {self._name}: no answer for {_HANGING_SECONDS:.0f} s; training continues")

    def _work(self) -> None:
        verb = ""
        try:
            self._busy_since = time.monotonic()
            tracker = self._open()
            while verb != "finish":
                self._busy_since = None
                verb, arguments = self._calls.get()
                self._busy_since = time.monotonic()
                self._run(tracker, verb, arguments)
        except BaseException as error:  # also a library's sys.exit, which would end this thread silently
            self._failed = True
            # training continues after any error of a tracker's library; the metrics are in the JSON log
            log.warning(f"tracker {self._name}: {type(error).__name__}: {error}; training continues without it")
        while verb != "finish":  # make room in the queue for the end
            verb, _ = self._calls.get()

    def _run(self, tracker: Tracker, verb: str, arguments: tuple[Any, ...]) -> None:
        if verb == "text" and not hasattr(tracker, verb):  # custom trackers may omit it
            return
        try:
            getattr(tracker, verb)(*arguments)
        except Exception as error:
            if verb != "artifact":
                raise
            log.warning(f"tracker {self._name}: could not store the artifact {arguments[0]}: {error}")
