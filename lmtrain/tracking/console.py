"""Progress of a run: a live view on a terminal, a plain line every few seconds elsewhere."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from lmtrain.runtime.progress import Progress
from lmtrain.tracking.live import Evaluated, LiveView, Shown


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
