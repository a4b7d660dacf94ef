"""Progress of a training run: rich's bar with details on a terminal, a plain line every few seconds elsewhere."""

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from lmtrain.runtime.progress import Progress


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


class Console:
    """Progress display; use as a context manager and call `show` after every step. Only the first process displays."""

    def __init__(self, total: int, start: int, is_first: bool):
        self._total = total
        self._start = start
        self._shown: Shown | None = None
        self._progress = Progress("train", total, start, quiet=not is_first)

    def __enter__(self) -> "Console":
        self._progress.__enter__()
        if self._progress.draws:
            self._progress.update(self._start, "compiling the first step")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, at)

    def drawn(self) -> Any:
        """The view as rich draws it on a terminal."""
        return self._progress.drawn()

    def show_evaluation(self, evaluated: Evaluated) -> None:
        """Show an evaluation: at once on a terminal, otherwise in the next line."""
        if self._progress.draws and self._shown is not None:
            self.show(replace(self._shown, evaluated=evaluated))

    def evaluating(self, done: int, total: int, what: str) -> None:
        """Show the progress of an evaluation: under the bar, or as a line every few seconds."""
        status = f"evaluating, {done:,} of {total:,} {what}"
        if not self._progress.draws:
            step = self._start if self._shown is None else self._shown.step
            self._progress.say_rarely(f"{step}/{self._total}, {status}")
        elif self._shown is None:
            self._progress.update(self._start, status)
        else:
            self._draw(replace(self._shown, status=status))

    def show(self, shown: Shown) -> None:
        self._shown = shown
        if self._progress.draws:
            self._draw(shown)
            return
        speed = _values(shown, 3)
        parts = [f"{shown.step}/{self._total}", *speed, *([shown.status] if shown.status else [])]
        is_end = shown.step in (1, self._total)
        self._progress.update(shown.step, ", ".join(parts), is_end, self._seconds_left(shown))

    def _draw(self, shown: Shown) -> None:
        loss, *speed = _values(shown, 4)
        coming = [
            f"{what} at step {at:,}"
            for what, at in (("evaluation", shown.next_evaluation), ("checkpoint", shown.next_save))
            if at is not None
        ]
        done = f"{shown.step:,}/{self._total:,}"
        if shown.evaluated is not None:
            loss += f", {speed.pop(0)} at step {shown.evaluated.step:,}"
        lines = [loss, ", ".join(speed), ", ".join(coming), shown.status, done]
        self._progress.update(shown.step, "\n".join(filter(None, lines)), seconds_left=self._seconds_left(shown))

    def _seconds_left(self, shown: Shown) -> float:
        """Remaining time at the speed of the last steps, without evaluations and saves."""
        return shown.seconds_per_step * (self._total - shown.step)


def _values(shown: Shown, digits: int) -> list[str]:
    """Loss, loss of the last evaluation, learning rate, speed and MFU, as far as they are known."""
    return [
        f"loss {shown.loss:.{digits}f}",
        *([f"eval {shown.evaluated.loss:.{digits}f}"] if shown.evaluated else []),
        f"lr {shown.learning_rate:.2e}",
        f"{shown.tokens_per_second:,.0f} tokens/s",
        *([f"MFU {shown.mfu:.1f} %"] if shown.mfu is not None else []),
    ]
