"""The log of a run: messages go to the terminal and to `<log_dir>/<run_id>.log`, to which restarts append."""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from typing import Any

from lmtrain.runtime.errors import RunError, UserError
from lmtrain.runtime.output import take_problems
from lmtrain.runtime.redact import redact


@dataclass(frozen=True)
class Processes:
    """Index of this process among `count` processes. `coordinator`: host:port of process 0, if there are several."""

    index: int = 0
    count: int = 1
    coordinator: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes files that exist once per run."""
        return self.index == 0


# A run of one process.
ALONE = Processes()


log = logging.getLogger("lmtrain")

# Libraries that log every file and thread at level INFO.
_CHATTY = ("absl", "jax", "orbax", "tensorboardX", "urllib3", "asyncio", "grain")


class _Formatter(logging.Formatter):
    """Formatter of all logs: masks secrets in URLs, also those in tracebacks and in messages of libraries."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _StderrHandler(logging.StreamHandler[Any]):
    """Handler that writes to the current `sys.stderr`: the live view replaces it, to draw below the log."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _FileHandler(WatchedFileHandler):
    """Handler that creates its file again if it is removed, with its folder. It also logs `take_problems`.

    An error of its file is said on stderr, once, and ends nothing.
    """

    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            for problem in take_problems():
                super().emit(log.makeRecord(log.name, logging.WARNING, "", 0, problem, (), None))
            super().emit(record)
        except OSError:  # of its folder
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            # not logged: another thread may hold the lock of the live view, and wait for that of this handler
            sys.stderr.write(f"{self.baseFilename} cannot be written: {error.strerror}; messages are shown only here\n")

    def close(self) -> None:
        for problem in take_problems():
            self.handle(log.makeRecord(log.name, logging.WARNING, "", 0, problem, (), None))
        with contextlib.suppress(OSError):
            super().close()

    def _open(self) -> TextIOWrapper:
        os.makedirs(os.path.dirname(self.baseFilename), exist_ok=True)
        return super()._open()


@contextmanager
def logging_restored() -> Iterator[None]:
    """Context of a command: closes the logs that it started, and restores the logging configuration.

    A program may call several commands, or train several runs, and have a log itself. Log levels of libraries are not
    restored: at process exit a library may log tracebacks of errors that were handled.
    """
    handlers, level, propagate = list(log.handlers), log.level, log.propagate
    try:
        yield
    finally:
        for handler in log.handlers:
            if handler not in handlers:
                handler.close()
        log.handlers[:] = handlers
        log.setLevel(level)
        log.propagate = propagate


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Context of work that is done again later, and logged then."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def start_console_log(processes: Processes = ALONE) -> None:
    """Log messages of lmtrain to stderr as plain lines; messages of libraries only from level WARNING.

    With several processes, only the first logs below WARNING; the others add their index to each line.
    """
    handler = _StderrHandler()
    handler.setFormatter(_Formatter("%(message)s"))
    if not processes.is_first:
        handler.setFormatter(_Formatter(f"[process {processes.index}] %(message)s"))
        handler.setLevel(logging.WARNING)
    for earlier in [handler for handler in log.handlers if isinstance(handler, _StderrHandler)]:
        log.removeHandler(earlier)  # from another run in this process
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    if logging.lastResort is not None:  # prints the warnings of libraries
        logging.lastResort.setFormatter(_Formatter("%(message)s"))
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("absl", "asyncio"):  # Orbax logs errors there, at length, before it raises them
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def errors_in_files() -> Iterator[None]:
    """Write an error of the block to the log files alone: the command prints it, or the program that called it does."""
    try:
        yield
    except Exception as error:
        has_message = isinstance(error, UserError | RunError)
        text = f"lmtrain: error: {error}" if has_message else "".join(traceback.format_exception(error)).rstrip()
        record = log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None)
        for handler in log.handlers:
            if isinstance(handler, _FileHandler):
                handler.handle(record)
        raise


def start_file_log(log_dir: str, run: str, processes: Processes = ALONE) -> str:
    """Also append all messages to `<log_dir>/<run>.log`, with times; each further process has a separate file.

    Returns the path.
    """
    os.makedirs(log_dir, exist_ok=True)
    path = os.path.join(log_dir, f"{run}.log" if processes.is_first else f"{run}.process-{processes.index}.log")
    handler = _FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    return path
