"""The interface of trackers: six methods; a thread that isolates their failures; a tracker of the user's own."""

import contextlib
import importlib
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lmtrain.runtime.errors import UserError, suggest_name
from lmtrain.runtime.logging import log


class Tracker(Protocol):
    """Receives the reports of a run. Methods may be slow or raise: the caller isolates them."""

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        """The resolved config, once, at the start."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics after `step` updates; steps never decrease."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Facts about the entire run, such as its number of parameters."""

    def artifact(self, path: str, name: str, kind: str) -> None:
        """A file or folder of the run to store, such as its code (`kind` code) or a profile."""

    def text(self, texts: Mapping[str, str], step: int) -> None:
        """Texts that the model generated after `step` updates, by their prompts. Custom trackers may omit this."""

    def finish(self) -> None:
        """Flush and close."""


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


_VERBS = ("hyperparameters", "log", "summary", "artifact", "finish")


def import_custom(path: str) -> Callable[..., Tracker]:
    """The class `package.module.Class`, from the installed packages or the current folder.

    Raises `UserError` if it cannot be imported, or lacks methods of a tracker.
    """
    module_name, _, class_name = path.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:  # the current folder is not on the path of an installed command
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any error of the user's code
        raise UserError(
            f"trainer.tracker: {module_name} cannot be imported: {type(error).__name__}: {error}; it has to be in the "
            "current folder, on PYTHONPATH or installed"
        ) from error
    custom = getattr(module, class_name, None)
    if custom is None:
        hint = suggest_name(class_name, dir(module))
        advice = f"; did you mean {hint!r}?" if hint else ""
        raise UserError(f"trainer.tracker: {getattr(module, '__file__', module_name)} has no {class_name!r}{advice}")
    missing = [verb for verb in _VERBS if not callable(getattr(custom, verb, None))]
    if missing:
        raise UserError(f"trainer.tracker: {path} is not a tracker: missing methods {', '.join(missing)}")
    tracker: Callable[..., Tracker] = custom
    return tracker


def check_arguments(path: str, custom: Callable[..., Tracker], arguments: Mapping[str, Any]) -> None:
    """Raise `UserError` if the class does not accept the arguments that it will be called with."""
    given = {"run": "", "folder": "", "step": 0}
    try:
        twice = sorted(given.keys() & arguments.keys())
        if twice:
            raise TypeError(f"{', '.join(twice)} is set by lmtrain")
        inspect.signature(custom).bind(**given, **arguments)
    except TypeError as error:
        raise UserError(
            f"trainer.tracker: {path} is called with run, folder, step and trainer.tracker.arguments: {error}"
        ) from None
    except ValueError:  # the class has no signature that can be inspected
        return
