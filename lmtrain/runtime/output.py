"""Standard streams that cannot be written: the disk of a log is full, a pipe has no reader, a terminal is gone.

Messages never end a run: what stderr does not take is dropped, and the run's log file says so once (`take_problems`).
The result of a command never disappears in silence: stdout raises `OutputError`.

This file imports nothing slow, since it is loaded before everything else.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

# Problems that no log file has named yet.
_problems: list[str] = []


class OutputError(Exception):
    """stdout cannot be written. `has_reader` is false if that is because its reader has ended, as with `| head`."""

    def __init__(self, message: str, has_reader: bool):
        super().__init__(message)
        self.has_reader = has_reader


class _Stream:
    """A standard stream whose errors of writing are dropped, or become an `OutputError`. All else is the stream's.

    `stream` is None if its descriptor was closed when Python started.
    """

    def __init__(self, name: str, stream: Any, drops: bool):
        self._name, self._drops = name, drops
        self._stream = stream
        self._has_problem = False

    def write(self, text: str) -> int:
        try:
            return int(self._open().write(text))
        except (OSError, ValueError) as error:  # ValueError: it is closed, or has no bytes for a character
            self._fail(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(error)

    def isatty(self) -> bool:
        try:
            return bool(self._open().isatty())
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        return int(self._open().fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _open(self) -> Any:
        if self._stream is None:
            raise OSError(errno.EBADF, "it is closed")
        return self._stream

    def _fail(self, error: OSError | ValueError) -> None:
        problem = f"{self._name} cannot be written: {getattr(error, 'strerror', None) or error}"
        if not self._drops:
            raise OutputError(problem, not isinstance(error, BrokenPipeError)) from None
        if not self._has_problem:
            self._has_problem = True
            _problems.append(f"{problem}; its messages are in this file only")


@contextlib.contextmanager
def standard_streams(has_result: bool) -> Iterator[None]:
    """Context, or decorator, of a command. `has_result`: it writes its result to stdout, so that errors are raised."""
    before = sys.stdout, sys.stderr
    stdout, stderr = (stream._stream if isinstance(stream, _Stream) else stream for stream in before)
    open_descriptors()
    sys.stdout = cast(TextIO, _Stream("stdout", stdout, drops=not has_result))
    sys.stderr = cast(TextIO, _Stream("stderr", stderr, drops=True))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def take_problems() -> list[str]:
    """Problems of the streams that this has not returned before. No lock is taken, so it may be called anywhere."""
    taken = []
    while _problems:
        taken.append(_problems.pop(0))
    return taken


def open_descriptors() -> None:
    """Open those of the descriptors 0, 1 and 2 that are closed (`2>&-`): the next file would get that number, and
    C libraries would write their messages into it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def discard_unwritten() -> None:
    """Before a program exits: drop what streams could not write, since Python would try again and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, stream.fileno())
                os.close(nothing)
