"""Reports steps to the trackers, the terminal and the goodput ledger, one step late."""

import math
import resource
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from lmtrain.evaluation.run import Findings
from lmtrain.models.moe.load import BY_LAYER
from lmtrain.runtime.errors import RunError
from lmtrain.runtime.logging import log
from lmtrain.tracking.console import Console, Evaluated, Shown
from lmtrain.tracking.goodput import DATA, EVALUATION, HOOKS, SAVING, STEPS, Timer
from lmtrain.train.loop.due import Due
from lmtrain.train.program.compile import ModelFlops
from lmtrain.train.program.program import Program
from lmtrain.train.start.reporting import Reporting
from lmtrain.train.step.norms import WATCH


def memory_in_use(devices: Iterable[Any]) -> dict[str, float]:
    """`memory/device_<id>/bytes` and `.../peak_bytes` of devices that report them, and `memory/host_peak_bytes`."""
    metrics = {}
    for device in devices:
        stats = device.memory_stats() or {}  # CPUs have none
        for name, key in (("bytes", "bytes_in_use"), ("peak_bytes", "peak_bytes_in_use")):
            if key in stats:
                metrics[f"memory/device_{device.id}/{name}"] = float(stats[key])
    unit = 1 if sys.platform == "darwin" else 1024
    metrics["memory/host_peak_bytes"] = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return metrics


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


class DivergedError(RunError):
    """The loss is NaN or infinite. No checkpoint was saved since it was finite."""


class Reporter:
    """Reads a step's metrics from the device while the next step is running, and passes them on."""

    def __init__(
        self,
        reporting: Reporting,
        program: Program,
        due: Due,
        console: Console,
        first_step: int,
        status: Callable[[], str] = lambda: "",
    ):
        self._reporting = reporting
        self._program = program
        self._config = program.config.trainer
        self._sizes = self._config.batch_sizes
        self._due = due
        self._console = console
        self._status = status
        self._throughput = Throughput(reporting.flops, program.config.model.seq_len, reporting.timer)
        self._pending: tuple[int, Any, Any] | None = None
        self._evaluated: Evaluated | None = None
        self._extra: dict[str, float] = {}
        self._ledger_at = first_step  # last step with ledger metrics: each step logs them once

    @property
    def summary(self) -> str:
        """One line about the speed of all steps; empty if there were too few."""
        return self._throughput.summary

    def add(self, metrics: dict[str, float]) -> None:
        """Add metrics to those of the next step that is reported."""
        self._extra |= metrics

    def report(self, keep: tuple[int, Any, Any] | None = None, ends: bool = False) -> None:
        """Report the pending step, and keep `keep` pending instead: number, metrics and requests of a step.

        `ends`: `report_end` will be called for the same step. Raises `DivergedError`.
        """
        pending, self._pending = self._pending, keep
        if pending is None:
            return
        step, on_device, requests = pending
        watch, sizes = self._program.watch, self._sizes
        norms, by_layer = on_device.pop(WATCH, {}), on_device.pop(BY_LAYER, {})
        waited = not on_device["train/loss"].is_ready()
        with self._program.explaining_errors():  # errors of the device are raised here
            metrics = {name: float(value) for name, value in jax.device_get(on_device).items()}
            if watch.shows(step):
                metrics |= watch.by_name(jax.device_get(norms))
                metrics |= self._of_layers(jax.device_get(by_layer))
        metrics |= self._throughput.step_done(sizes.at(step - 1), sizes.before(step), waited)
        self._due.learn(step, jax.device_get(requests), self._throughput.last_step_seconds)
        with self._reporting.timer.section(HOOKS):
            ledger = self._reporting.ledger.step_done(step)
            if ledger and not ends:
                self._ledger_at = step
                metrics |= ledger | memory_in_use(jax.local_devices())
            extra, self._extra = self._extra, {}
            self._reporting.trackers.log(metrics | extra, step)
            self._check(step, metrics["train/loss"])
            self._show(step, metrics)

    def _of_layers(self, by_layer: Mapping[str, Any]) -> dict[str, float]:
        """Metrics of each layer with experts, such as `moe/max_load/blocks/0`."""
        mixture = self._program.config.model.mixture
        layers = mixture.layers if mixture else ()
        return {
            f"{name}/blocks/{layer}": float(value)
            for name, values in by_layer.items()
            for layer, value in zip(layers, values, strict=False)
        }

    def report_evaluation(self, step: int, findings: Findings) -> None:
        """Log and show the findings of the evaluations after `step` updates."""
        metrics = findings.metrics
        with self._reporting.timer.section(HOOKS):
            if metrics:
                self._reporting.trackers.log(metrics, step)
            if findings.texts:
                self._reporting.trackers.text(findings.texts, step)
            if "eval/loss" in metrics:
                self._evaluated = Evaluated(step, metrics["eval/loss"])
                self._console.show_evaluation(self._evaluated)
            for line in findings.lines:
                log.info(f"step {step}: {line}")

    def report_end(self, step: int) -> None:
        """Log the final ledger and memory metrics, after `step` updates; nothing if no step was trained."""
        self._reporting.ledger.write()
        if step > self._ledger_at:
            self._reporting.trackers.log(self._reporting.ledger.metrics() | memory_in_use(jax.local_devices()), step)

    def _show(self, step: int, metrics: dict[str, float]) -> None:
        tokens_per_second, seconds = self._throughput.recent
        self._console.show(
            Shown(
                step=step,
                loss=metrics["train/loss"],
                learning_rate=metrics["train/learning_rate"],
                tokens_per_second=tokens_per_second,
                seconds_per_step=seconds,
                mfu=self._reporting.flops.rates(tokens_per_second).get("throughput/mfu"),
                evaluated=self._evaluated,
                next_evaluation=self._due.next_evaluation(step),
                next_save=self._due.next_save(step, seconds),
                status=self._status(),
            )
        )

    def _check(self, step: int, loss: float) -> None:
        config, sizes = self._config, self._sizes
        if (math.isnan(loss) and config.crash_on_nan) or (math.isinf(loss) and config.crash_on_inf):
            raise DivergedError(
                f"the loss of step {step} is {loss}; no checkpoint was saved since it was finite. Its batch: sequences "
                f"{sizes.before(step - 1):,} to {sizes.before(step) - 1:,} of the training data. Lower "
                "optimizer.learning_rate or lengthen optimizer.warmup; delete the last checkpoints if it happens again"
            )
