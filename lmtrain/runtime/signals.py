"""What SIGTERM, SIGINT, SIGUSR1 and SIGHUP do. Slurm sends SIGUSR1 if `--signal` is set; clouds and Kubernetes announce
a preemption by SIGTERM; a terminal that closes sends SIGHUP, which `nohup` lets a command ignore.

From the first moment of any command they end the process at once, as there is nothing to save (`end_at_once`). Within
a `StopRequest` the first one requests a stop, and the second one ends the process at once, unless it is SIGHUP.

Python runs a handler in the main thread, between two bytecodes: not while that thread compiles a program, waits for a
device, or is stuck in a library. So the process is ended by a thread, which reads the numbers of the signals from a
pipe (`signal.set_wakeup_fd`). It takes no lock, flushes nothing and cleans nothing up, because each of these could wait
for what the main thread holds. Nothing is lost: files are written so that a kill at any moment leaves them complete or
ignored, each line of the log is flushed, and the workers of a build end when they lose their parent. Only a library
that keeps Python's global lock for long delays the end.

This file imports nothing slow, since it is loaded before everything else.
"""

import atexit
import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType, TracebackType

STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: run the same command again
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

_STDERR = 2
_SHOW_CURSOR = "\x1b[?25h\n"  # a progress display hides it


class StoppedError(Exception):
    """An operation was aborted because a signal requested a stop."""


class _Handlers:
    """Handlers of the stop signals, until `restore`. The first `allowed` signals call `receive` in the main thread, as
    soon as it can run Python; the next one ends the process at once, in whichever thread sees it first. To be created
    and restored in the main thread.
    """

    def __init__(self, receive: Callable[[int], None], allowed: int):
        self._receive = receive
        self._allowed = allowed
        self._handled = 0
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # Python requires it
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # nohup starts a command that ignores SIGHUP
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        self._before = {number: signal.signal(number, self._handle) for number in {*STOP_SIGNALS} - ignored}
        _installed.append(self)

    @property
    def numbers(self) -> Collection[int]:
        """The signals that have these handlers."""
        return self._before.keys()

    def restore(self) -> None:
        """Restore the handlers that were there before."""
        _installed.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._outer)
        os.close(self._writer)  # ends the thread

    def _counts(self, number: int) -> bool:
        """Whether a signal is the first or the second. SIGHUP is neither if it requests a stop: a closed terminal sends
        it several times (the kernel and the shell), and systemd sends it after SIGTERM."""
        return number in STOP_SIGNALS and (number != signal.SIGHUP or self._allowed == 0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled += self._counts(number)
        if self._handled > self._allowed:
            _end(number)
        self._receive(number)

    def _watch(self, reader: int) -> None:
        seen = 0
        while numbers := os.read(reader, 64):
            for number in numbers:
                seen += self._counts(number)
                if seen > self._allowed:
                    _end(number)
        os.close(reader)


_installed: list[_Handlers] = []
_ending = threading.Lock()


class StopRequest:
    """Between `begin` and `end`, the first signal sets `requested` instead of ending the process, and logs `doing`.

    As a context it begins at once.
    """

    def __init__(self, doing: str = "finishing this step and saving") -> None:
        self.requested = False
        self.doing = doing
        self._handlers: _Handlers | None = None

    def begin(self) -> None:
        self._handlers = _Handlers(self._receive, allowed=1)

    def end(self) -> None:
        """Signals have again the effect that they had before `begin`; nothing if it was not called."""
        if self._handlers is not None:
            self._handlers.restore()
            self._handlers = None

    def __enter__(self) -> "StopRequest":
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def _receive(self, number: int) -> None:
        from lmtrain.runtime.logging import log

        self.requested = True
        again = "" if number == signal.SIGHUP else "; send it again to exit immediately"
        log.info(f"{signal.Signals(number).name}: {self.doing}{again}")


def end_at_once() -> None:
    """From now on, the first signal ends the process at once, with code 75. For programs: never undone before exit."""
    handlers = _Handlers(lambda number: None, allowed=0)
    atexit.register(handlers.restore)  # later there is no thread that could end the process


def _end(number: int) -> None:
    if _ending.acquire(blocking=False):
        text = f"{signal.Signals(number).name}: exiting immediately; run the same command again\n"
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed, or its disk full
            if os.isatty(_STDERR):
                text = _SHOW_CURSOR + text
            if select.select([], [_STDERR], [], 0)[1]:  # a full pipe would block
                os.write(_STDERR, text.encode())
    else:  # the other thread is writing the line
        time.sleep(1)
    os._exit(STOPPED_BY_SIGNAL)


def _forget_in_child() -> None:
    """A forked process has the pipes of its parent, but not the threads: without this, its signals end the parent."""
    if _installed:
        signal.set_wakeup_fd(-1)
        for number in _installed[0].numbers:
            signal.signal(number, signal.SIG_DFL)
        _installed.clear()


os.register_at_fork(after_in_child=_forget_in_child)
