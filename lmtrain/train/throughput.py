"""How fast a run is: the rates of each step, and the model FLOPs utilization of the devices.

MFU is the FLOPs that the model needs for the tokens of a second, over the peak of all devices, in percent. Needed are
the matrix products of a forward pass and twice as many for the backward pass, whatever is computed again. `mfu` counts
attention as if every token saw all others (as in Chowdhery et al. 2022, PaLM, appendix B, and most published figures);
`mfu_causal` counts the half that a causal model needs. Waiting for data counts; evaluation and saving do not.
"""

import time
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Work:
    """What a token costs, and what the devices can do. FLOPs of forward and backward pass; peak FLOPs per second of
    all devices together, None if it is not known."""

    flops_per_token: float
    causal_flops_per_token: float
    peak_flops: float | None

    def rates(self, tokens_per_second: float) -> dict[str, float]:
        achieved = self.flops_per_token * tokens_per_second
        rates = {"throughput/gflops_per_second": achieved / 1e9}
        if self.peak_flops is not None:
            rates["throughput/mfu"] = 100 * achieved / self.peak_flops
            rates["throughput/mfu_causal"] = 100 * self.causal_flops_per_token * tokens_per_second / self.peak_flops
        return rates


class Throughput:
    """Rates between one finished step and the next. Pauses (evaluation, saving) are not part of a step."""

    def __init__(self, work: Work, seq_len: int) -> None:
        self._work = work
        self._seq_len = seq_len
        self._tokens = 0
        self._last = time.perf_counter()
        self.loading = Stopwatch()
        self.hooks = Stopwatch()
        self.step_seconds = 0.0
        self.loading_seconds = 0.0
        self._steps = 0

    def step_done(self, examples: int, examples_so_far: int) -> dict[str, float]:
        """Metrics of the step that has just finished, of so many sequences. Seconds, unless a name says otherwise."""
        now = time.perf_counter()
        duration, self._last = now - self._last, now
        loading = self.loading.reset()
        tokens, total_tokens = examples * self._seq_len, examples_so_far * self._seq_len
        self._steps += 1
        if self._steps > 2:  # the first waits for the compiler, and the second was dispatched while it did
            self._tokens += tokens
            self.step_seconds += duration
            self.loading_seconds += loading
        return {
            "throughput/duration": duration,
            "throughput/loading_time": loading,
            "throughput/hook_time": self.hooks.reset(),
            "throughput/examples_per_second": examples / duration,
            "throughput/tokens_per_second": tokens / duration,
            "throughput/total_tokens": total_tokens,
            "throughput/total_gflops": self._work.flops_per_token * total_tokens / 1e9,
            **self._work.rates(tokens / duration),
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
