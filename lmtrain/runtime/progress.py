"""Progress display: a live bar on a terminal, otherwise a plain line every few seconds."""

import os
import sys
import time
from types import TracebackType
from typing import Any

_SECONDS_BETWEEN_LINES, _MOST_SECONDS, _LINES_BEFORE = 5.0, 60.0, 20


class Progress:
    """Progress bar or lines. Call `update(done, text)` at any rate: the output is rate-limited, and off if `quiet`.

    With `bar=False` it prints lines on a terminal too. Use as a context manager, inside which `draws` says which.
    """

    def __init__(self, label: str, total: int, start: int = 0, quiet: bool = False, bar: bool = True):
        self._quiet = quiet
        self._may_draw = bar
        self.label = label
        self.total = total
        self._start = start
        self._done = start
        self._began = time.monotonic()
        self._last_line, self._text = 0.0, ""
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "Progress":
        # a terminal that cannot move its cursor would not show a bar before the end
        moves_cursor = os.environ.get("TERM") not in ("dumb", "unknown")
        if self._may_draw and sys.stderr.isatty() and moves_cursor and not self._quiet:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}", markup=False),
            )
            # stdout that is redirected to a file stays there
            redirect = sys.stdout.isatty()
            self._bar = Bar(*columns, console=stderr_console(), refresh_per_second=5, redirect_stdout=redirect)
            self._task = self._bar.add_task(self.label, total=self.total, completed=self._start, text="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def draws(self) -> bool:
        return self._bar is not None

    def drawn(self) -> Any:
        """The bar as rich draws it."""
        return self._bar.get_renderable()

    def update(
        self, done: int, text: str, force: bool = False, seconds_left: float | None = None, total: int | None = None
    ) -> None:
        """Show `done` of `total` and `text`. `force` prints the plain line regardless of the rate limit.

        Without `seconds_left`, the remaining time is extrapolated from the average speed. A new `total` starts again
        from 0.
        """
        if total is not None and (total != self.total or done < self._done):
            self.total, self._start, self._began = total, 0, time.monotonic()
        self._done = done
        text = f"{text}{self._left(done, seconds_left)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=self.total, text=text)
            return
        self.say_rarely(text, force)

    def say_rarely(self, text: str, force: bool = False) -> None:
        """Print a plain line, unless one was printed in the last few seconds."""
        now = time.monotonic()
        # fewer lines in the log of a long run
        between = min(max(_SECONDS_BETWEEN_LINES, (now - self._began) / _LINES_BEFORE), _MOST_SECONDS)
        is_due = now - self._last_line >= between and text != self._text
        if not self._quiet and (force or is_due):
            self._last_line, self._text = now, text
            # in one write: print writes the newline separately, and another thread's line may come in between
            sys.stderr.write(f"{self.label} {text}\n")
            sys.stderr.flush()

    def _left(self, done: int, seconds: float | None) -> str:
        gained = done - self._start
        if gained <= 0 or done >= self.total:
            return ""
        if seconds is None:
            seconds = (time.monotonic() - self._began) * (self.total - done) / gained
        return f", {format_seconds(seconds)} left"


def stderr_console() -> Any:
    """Rich's console on stderr."""
    from rich.console import Console

    # at a width of 0, some tools' "unknown", it would show nothing, not even the log
    return Console(stderr=True, width=80 if os.environ.get("COLUMNS") == "0" else None)


def format_seconds(seconds: float) -> str:
    """`75` -> `1m15s`, `7300` -> `2h01m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_bytes(size: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
