"""Throughput of each step, and its means. Waiting for data counts; evaluation and saving do not."""

from collections import deque

from lmtrain.tracking.timer import DATA, EVALUATION, HOOKS, SAVING, STEPS, Timer
from lmtrain.train.program.mfu import ModelFlops

# The first step waits for the compiler, and the second was dispatched while it did: both are left out of all means.
_WARM_UP_STEPS = 2
# Number of steps over which the displayed speed is averaged.
_RECENT = 20


class Throughput:
    """Rates between two finished steps. Pauses (evaluation, saving) are not part of a step."""

    def __init__(self, flops: ModelFlops, seq_len: int, timer: Timer) -> None:
        self._flops = flops
        self._seq_len = seq_len
        self._timer = timer
        self._booked = timer.seconds
        self._before = (0, 0.0)  # sequences and seconds of the previous step
        self._steps = 0
        self._tokens = 0
        self._seconds = self._loading_seconds = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # tokens and seconds of a step
        self.last_step_seconds = 0.0  # without waiting for data

    def step_done(self, examples: int, examples_so_far: int, waited: bool = True) -> dict[str, float]:
        """Metrics of the step of `examples` sequences that has just finished. Seconds unless a name says otherwise.

        `waited`: the host had to wait for the step. If not, the step had finished earlier, while the host was delayed
        in the previous step; it then gets the mean speed of both, since its measured time is too short.
        """
        before, self._booked = self._booked, self._timer.seconds
        since = {section: self._booked[section] - before[section] for section in before}
        loading = since[DATA]
        duration = since[STEPS] + since[HOOKS] + loading
        self.last_step_seconds = duration - loading
        tokens, total_tokens = examples * self._seq_len, examples_so_far * self._seq_len
        (earlier, seconds), self._before = self._before, (examples, duration)
        per_second = examples / duration
        if not waited and earlier:
            per_second = (examples + earlier) / (duration + seconds)
        tokens_per_second = per_second * self._seq_len
        self._add(tokens, duration, loading, tokens / tokens_per_second)
        return {
            "throughput/duration": examples / per_second,
            "throughput/loading_time": loading,
            "throughput/hook_time": since[HOOKS] + since[EVALUATION] + since[SAVING],
            "throughput/examples_per_second": per_second,
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/total_tokens": total_tokens,
            "throughput/total_gflops": self._flops.flops_per_token * total_tokens / 1e9,
            **self._flops.rates(tokens_per_second),
        }

    def _add(self, tokens: int, seconds: float, loading: float, shown_seconds: float) -> None:
        """Add a step to the means, which start again while the steps are those of the warm-up."""
        self._steps += 1
        if self._steps <= _WARM_UP_STEPS + 1:
            self._tokens, self._seconds, self._loading_seconds = 0, 0.0, 0.0
            self._recent.clear()
        self._tokens += tokens
        self._seconds += seconds
        self._loading_seconds += loading
        self._recent.append((tokens, shown_seconds))

    @property
    def recent(self) -> tuple[float, float]:
        """Tokens per second and seconds per step, over the last steps. There must have been one."""
        tokens, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        return tokens / seconds, seconds / len(self._recent)

    @property
    def summary(self) -> str:
        """One line about all steps but the first two; empty if there were no more."""
        steps = self._steps - _WARM_UP_STEPS
        if steps <= 0:
            return ""
        tokens_per_second = self._tokens / self._seconds
        mfu = self._flops.rates(tokens_per_second).get("throughput/mfu")
        return (
            f"{tokens_per_second:,.0f} tokens/s, {1000 * self._seconds / steps:.0f} ms a step"
            f"{'' if mfu is None else f', MFU {mfu:.1f} %'}, "
            f"waiting for data {100 * self._loading_seconds / self._seconds:.2f} % of it"
        )
