"""Where the time of a run goes."""

import time


class Stopwatch:
    """Adds up seconds spent in a `with` block."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "Stopwatch":
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began

    def reset(self) -> float:
        """The seconds so far, starting again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Throughput:
    """Rates between one finished step and the next. Pauses (evaluation, saving) are not part of a step."""

    def __init__(self) -> None:
        self._tokens = 0
        self._last = time.perf_counter()
        self.loading = Stopwatch()
        self.step_seconds = 0.0
        self.loading_seconds = 0.0
        self._steps = 0

    def step_done(self, tokens: int) -> dict[str, float]:
        """Metrics of the step that has just finished, of so many tokens."""
        now = time.perf_counter()
        duration, self._last = now - self._last, now
        loading = self.loading.reset()
        self._steps += 1
        if self._steps > 2:  # the first waits for the compiler, and the second was dispatched while it did
            self._tokens += tokens
            self.step_seconds += duration
            self.loading_seconds += loading
        return {
            "throughput/duration": duration,
            "throughput/loading_time": loading,
            "throughput/tokens_per_second": tokens / duration,
        }

    def resume_clock(self) -> None:
        """Do not count what happened since the last step."""
        self._last = time.perf_counter()

    @property
    def summary(self) -> str:
        """One line for the end of a run; empty if there were too few steps to say anything."""
        if not self.step_seconds:
            return ""
        steps = self._steps - 2
        return (
            f"{self._tokens / self.step_seconds:,.0f} tokens/s, "
            f"{1000 * self.step_seconds / steps:.0f} ms a step, "
            f"waiting for data {100 * self.loading_seconds / self.step_seconds:.2f} % of it"
        )
