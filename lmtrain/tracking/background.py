"""Runs a tracker in its own thread, so that a slow or failing service does not affect training."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lmtrain.runtime.logging import log
from lmtrain.tracking.tracker import Tracker

_QUEUE_SIZE = 1000
# Calls that take longer are logged as a warning.
_HANGING_SECONDS = 60.0


class BackgroundTracker:
    """A tracker whose calls return at once. Its first error is logged; after that it gets no more calls.

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

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        self._put("hyperparameters", config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._start()  # not before: trackers' libraries import slowly, and by now the first step is done
        self._put("log", metrics, step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._put("summary", values)

    def artifact(self, path: str, name: str, kind: str) -> None:
        self._put("artifact", path, name, kind)

    def text(self, texts: Mapping[str, str], step: int) -> None:
        self._put("text", texts, step)

    def finish(self) -> None:
        """Wait for the queued calls, at most `finish_seconds` in total."""
        self._start()
        deadline = time.monotonic() + self.finish_seconds
        while not self._failed and time.monotonic() < deadline:
            try:
                self._calls.put(("finish", ()), timeout=0.1)  # the queue may be full: wait, but not for a dead tracker
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning(f"tracker {self._name}: still busy after {self.finish_seconds:.0f} s; abandoned")
        if self._dropped:
            log.warning(f"tracker {self._name}: too slow, {self._dropped} calls were dropped; the JSON log has them")

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._thread.start()

    def _put(self, verb: str, *arguments: Any) -> None:
        if self._failed:
            return
        self._watch()
        try:
            self._calls.put_nowait((verb, arguments))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    f"tracker {self._name}: too slow, its queue is full and calls are dropped; training continues"
                )

    def _watch(self) -> None:
        since = self._busy_since
        if since is not None and not self._warned_hanging and time.monotonic() - since > _HANGING_SECONDS:
            self._warned_hanging = True
            log.warning(f"tracker {self._name}: no answer for {_HANGING_SECONDS:.0f} s; training continues")

    def _work(self) -> None:
        try:
            self._busy_since = time.monotonic()
            tracker = self._open()
            verb = ""
            while verb != "finish":
                self._busy_since = None
                verb, arguments = self._calls.get()
                self._busy_since = time.monotonic()
                if verb == "text" and not hasattr(tracker, verb):  # custom trackers may omit it
                    continue
                try:
                    getattr(tracker, verb)(*arguments)
                except Exception as error:
                    if verb != "artifact":
                        raise
                    log.warning(f"tracker {self._name}: could not store the artifact {arguments[0]}: {error}")
        except BaseException as error:  # also a library's sys.exit, which would end this thread silently
            self._failed = True
            # training continues after any error of a tracker's library; the metrics are in the JSON log
            log.warning(f"tracker {self._name}: {type(error).__name__}: {error}; training continues without it")
