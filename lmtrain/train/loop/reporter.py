"""Reports steps to the trackers, the terminal and the goodput ledger, one step late."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lmtrain.config.errors import RunError
from lmtrain.evaluation.run import Findings
from lmtrain.models.moe.load import BY_LAYER
from lmtrain.runtime.logging import log
from lmtrain.tracking.console import Console
from lmtrain.tracking.live import Evaluated, Shown
from lmtrain.tracking.timer import HOOKS
from lmtrain.train.loop.due import Due
from lmtrain.train.loop.memory_in_use import memory_in_use
from lmtrain.train.loop.throughput import Throughput
from lmtrain.train.program.program import Program
from lmtrain.train.start.reporting import Reporting
from lmtrain.train.step.norms import WATCH


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
