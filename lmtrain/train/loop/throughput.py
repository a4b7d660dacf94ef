"""Throughput of each step. Waiting for data counts; evaluation and saving do not."""

from lmtrain.tracking.timer import DATA, EVALUATION, HOOKS, SAVING, STEPS, Timer
from lmtrain.train.program.work import Work

# The next step starts only after a step that takes longer than this has finished: this costs the milliseconds in which
# the host prepares the next step, and a stop signal takes effect one step earlier.
LONG_STEP_SECONDS = 5.0


class Throughput:
    """Rates between two finished steps. Pauses (evaluation, saving) are not part of a step."""

    def __init__(self, work: Work, seq_len: int, timer: Timer) -> None:
        self._work = work
        self._seq_len = seq_len
        self._timer = timer
        self._booked = timer.seconds
        self._tokens = 0
        self._before = (0, 0.0)  # sequences and seconds of the previous step
        self.step_seconds = 0.0
        self.loading_seconds = 0.0
        self.has_long_steps = True  # until a short step is known
        self._steps = 0

    def step_done(self, examples: int, examples_so_far: int, waited: bool = True) -> dict[str, float]:
        """Metrics of the step of `examples` sequences that has just finished. Seconds unless a name says otherwise.

        `waited`: the host had to wait for the step. If not, the step had finished earlier, while the host was delayed
        in the previous step; it then gets the mean speed of both, since its measured time is too short.
        """
        before, self._booked = self._booked, self._timer.seconds
        since = {section: self._booked[section] - before[section] for section in before}
        loading = since[DATA]
        duration = since[STEPS] + since[HOOKS] + loading
        self.has_long_steps = duration - loading > LONG_STEP_SECONDS
        tokens, total_tokens = examples * self._seq_len, examples_so_far * self._seq_len
        self._steps += 1
        if self._steps > 2:  # the first waits for the compiler, and the second was dispatched while it did
            self._tokens += tokens
            self.step_seconds += duration
            self.loading_seconds += loading
        (earlier, seconds), self._before = self._before, (examples, duration)
        per_second = examples / duration
        if not waited and earlier:
            per_second = (examples + earlier) / (duration + seconds)
        tokens_per_second = per_second * self._seq_len
        return {
            "throughput/duration": examples / per_second,
            "throughput/loading_time": loading,
            "throughput/hook_time": since[HOOKS] + since[EVALUATION] + since[SAVING],
            "throughput/examples_per_second": per_second,
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/total_tokens": total_tokens,
            "throughput/total_gflops": self._work.flops_per_token * total_tokens / 1e9,
            **self._work.rates(tokens_per_second),
        }

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
