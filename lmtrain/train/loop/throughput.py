"""How fast a run is: the rates of each step. Waiting for data counts; evaluation and saving do not."""

import time

from lmtrain.train.program.work import Work

# A step that takes longer is finished before the next one begins: that costs the milliseconds in which the host
# prepares it, and a signal to stop the run is followed one step earlier.
LONG_STEP_SECONDS = 5.0


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

    def __init__(self, work: Work, seq_len: int) -> None:
        self._work = work
        self._seq_len = seq_len
        self._tokens = 0
        self._before = (0, 0.0)  # sequences and seconds of the step before
        self._last = time.perf_counter()
        self.loading = Stopwatch()
        self.hooks = Stopwatch()
        self.step_seconds = 0.0
        self.loading_seconds = 0.0
        self.has_long_steps = True  # until one is known not to be
        self._steps = 0

    def step_done(self, examples: int, examples_so_far: int, waited: bool = True) -> dict[str, float]:
        """Metrics of the step that has just finished, of so many sequences. Seconds, unless a name says otherwise.

        `waited` says that the host had to wait for it. If not, it was finished before, while the host was held up in
        the step before it: then it has the mean speed of the two, since the short rest is no time of a step.
        """
        now = time.perf_counter()
        duration, self._last = now - self._last, now
        loading = self.loading.reset()
        self.has_long_steps = duration - loading > LONG_STEP_SECONDS
        tokens, total_tokens = examples * self._seq_len, examples_so_far * self._seq_len
        self._steps += 1
        if self._steps > 2:  # the first waits for the compiler, and the second was dispatched while it did
            self._tokens += tokens
            self.step_seconds += duration
            self.loading_seconds += loading
        before, self._before = self._before, (examples, duration)
        per_second = examples / duration
        if not waited and before[0]:
            per_second = (examples + before[0]) / (duration + before[1])
        tokens_per_second = per_second * self._seq_len
        return {
            "throughput/duration": examples / per_second,
            "throughput/loading_time": loading,
            "throughput/hook_time": self.hooks.reset(),
            "throughput/examples_per_second": per_second,
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/total_tokens": total_tokens,
            "throughput/total_gflops": self._work.flops_per_token * total_tokens / 1e9,
            **self._work.rates(tokens_per_second),
        }

    def resume_clock(self) -> None:
        """Do not count what happened since the last step."""
        self._last = time.perf_counter()

    @property
    def summary(self) -> str:
        """One line about all steps but the first two; empty if there were no more."""
        if not self.step_seconds:
            return ""
        seconds = self.step_seconds / (self._steps - 2)
        mfu = self._work.rates(self._tokens / self.step_seconds).get("throughput/mfu")
        return (
            f"{self._tokens / self.step_seconds:,.0f} tokens/s, {1000 * seconds:.0f} ms a step"
            f"{'' if mfu is None else f', MFU {mfu:.1f} %'}, "
            f"waiting for data {100 * self.loading_seconds / self.step_seconds:.2f} % of it"
        )
