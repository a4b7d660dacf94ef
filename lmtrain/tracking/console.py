"""Progress of a run: a live view on a terminal, a plain line every few seconds elsewhere."""

import os
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np

from lmtrain.runtime.progress import Progress, format_seconds, stderr_console

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 40
_DRAWS_PER_SECOND = 4


@dataclass(frozen=True)
class Evaluated:
    """The loss of the last evaluation, and its step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Values shown after a step. `next_*` are steps (estimates if due by the clock), None if there is none."""

    step: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds_per_step: float
    mfu: float | None = None
    evaluated: Evaluated | None = None
    next_evaluation: int | None = None
    next_save: int | None = None
    status: str = ""


class LiveView:
    """A live view on stderr; use as a context manager. `title` names the run, `losses` are those up to `start`."""

    def __init__(self, title: str, total: int, start: int, losses: Sequence[float] = (), console: Any = None):
        from rich.live import Live

        self._title = title
        self._total, self._start = total, start
        self._began = time.monotonic()
        self._losses = array("d", losses)
        self._shown: Shown | None = None
        self._live = Live(
            console=console or stderr_console(),
            get_renderable=self.render,
            refresh_per_second=_DRAWS_PER_SECOND,
            transient=False,
            redirect_stdout=sys.stdout.isatty(),  # keep stdout that is redirected to a file
        )

    def __enter__(self) -> "LiveView":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def show(self, shown: Shown) -> None:
        """Set the values to draw; drawing happens in another thread and does not delay the step."""
        if self._shown is None or shown.step > self._shown.step:
            self._losses.append(shown.loss)
        self._shown = shown

    def render(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        shown = self._shown
        elapsed = time.monotonic() - self._began
        step = self._start if shown is None else shown.step
        head = Text.assemble((self._title, "bold"), f"  {format_seconds(elapsed)}")
        bar = Table.grid(padding=(0, 1))
        done = f"{step:,}/{self._total:,}"
        bar.add_row(
            ProgressBar(self._total, step, width=40),
            Text(f"{done}  {100 * step / self._total:.0f} %{self._left(step)}"),
        )
        if shown is None:
            return Group(head, bar, Text("compiling the first step", style="dim"))
        grid = Table.grid(padding=(0, 2))
        mfu = "" if shown.mfu is None else f"    MFU {shown.mfu:.1f} %"
        curve = sparkline(thin(self._losses, _POINTS))
        grid.add_row(Text("loss", "dim"), Text.assemble((f"{shown.loss:.4f}", "bold"), f"  {curve}"))
        if shown.evaluated is not None:
            grid.add_row(Text("eval", "dim"), Text(f"{shown.evaluated.loss:.4f}  after step {shown.evaluated.step:,}"))
        speed = f"{shown.tokens_per_second:,.0f} tokens/s    {_short(shown.seconds_per_step)} a step{mfu}"
        grid.add_row(Text("speed", "dim"), Text(f"{speed}    lr {shown.learning_rate:.2e}"))
        coming = [
            f"{what} at step {at:,}{_in(at - step, shown.seconds_per_step)}"
            for what, at in (("evaluation", shown.next_evaluation), ("checkpoint", shown.next_save))
            if at is not None
        ]
        if coming:
            grid.add_row(Text("next", "dim"), Text(", ".join(coming)))
        if shown.status:
            grid.add_row(Text("status", "dim"), Text(shown.status))
        return Group(head, bar, grid)

    def _left(self, step: int) -> str:
        """Remaining time at the speed of the last steps, without evaluations and saves."""
        if self._shown is None or step >= self._total:
            return ""
        return f"    {format_seconds(self._shown.seconds_per_step * (self._total - step))} left"


def thin(values: Sequence[float], limit: int) -> list[float]:
    """Fewer than `limit` points, each the mean of the same number of values; NaN and infinities are left out."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    each = 1
    while len(finite) // each >= limit:
        each *= 2
    complete = finite[: len(finite) // each * each]
    return complete.reshape(-1, each).mean(axis=1).tolist()


def sparkline(values: list[float]) -> str:
    """`█▆▄▃▂▁▁` for decreasing values; empty for none.

    The last three quarters define the scale: the initial drop of a loss would hide later changes.
    """
    if not values:
        return ""
    shown = values[len(values) // 4 :]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    levels = (int((value - low) / span * len(_BARS)) for value in values)
    return "".join(_BARS[max(0, min(level, len(_BARS) - 1))] for level in levels)


def _in(steps: int, seconds: float) -> str:
    return f" (in {format_seconds(steps * seconds)})" if steps > 0 else ""


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


class Console:
    """Progress display; use as a context manager and call `show` after every step. Only the first process displays.

    `losses` are those of the steps up to `start`, of a resumed run.
    """

    def __init__(self, title: str, total: int, start: int, is_first: bool, losses: Sequence[float] = ()):
        self._total = total
        self._start = start
        self._shown: Shown | None = None
        # a terminal that cannot move its cursor would not show a live view before the end
        draws = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        self._view = LiveView(title, total, start, losses) if is_first and draws else None
        self._lines = Progress("train", total, start, quiet=not is_first, bar=False)

    def __enter__(self) -> "Console":
        (self._view or self._lines).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        (self._view or self._lines).__exit__(kind, error, at)

    def show_evaluation(self, evaluated: Evaluated) -> None:
        """Show an evaluation: at once in the live view, otherwise in the next line."""
        if self._view is not None and self._shown is not None:
            self._view.show(replace(self._shown, evaluated=evaluated))

    def evaluating(self, done: int, total: int, what: str) -> None:
        """Show the progress of an evaluation: in the live view, or as a line every few seconds."""
        if self._view is not None and self._shown is not None:
            self._view.show(replace(self._shown, status=f"evaluating, {done:,} of {total:,} {what}"))
        elif self._view is None:
            step = self._start if self._shown is None else self._shown.step
            self._lines.say_rarely(f"{step}/{self._total}, evaluating, {done:,} of {total:,} {what}")

    def show(self, shown: Shown) -> None:
        self._shown = shown
        if self._view is not None:
            self._view.show(shown)
        else:
            left = shown.seconds_per_step * (self._total - shown.step)
            self._lines.update(shown.step, self._line(shown), shown.step in (1, self._total), left)

    def _line(self, shown: Shown) -> str:
        parts = [
            f"{shown.step}/{self._total}",
            f"loss {shown.loss:.3f}",
            *([f"eval {shown.evaluated.loss:.3f}"] if shown.evaluated else []),
            f"lr {shown.learning_rate:.2e}",
            f"{shown.tokens_per_second:,.0f} tokens/s",
            *([f"MFU {shown.mfu:.1f} %"] if shown.mfu is not None else []),
            *([shown.status] if shown.status else []),
        ]
        return ", ".join(parts)
