"""Saves a run at a step: its checkpoint and its export; and the best step by a metric."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import BestConfig, Kind
from lmtrain.evaluation.config import EarlyStoppingConfig
from lmtrain.runtime.errors import suggest_name
from lmtrain.runtime.logging import log
from lmtrain.tracking.goodput import HOOKS, SAVING, Timer
from lmtrain.tracking.open import Trackers
from lmtrain.train.start.resume import DECISIONS, EVALUATION_PENDING
from lmtrain.train.step.state import TrainState

if TYPE_CHECKING:
    from lmtrain.train.start.exporter import Exporter


class BestSoFar:
    """The best value of a metric, its step, and the number of evaluations since then. `saved` is a former `state`."""

    def __init__(self, config: BestConfig, saved: Mapping[str, Any] | None = None):
        self._config = config
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0
        self._warned = False
        if saved is not None and saved["metric"] == config.metric and saved["mode"] == config.mode:
            self.value, self.step, self.waited = saved["value"], saved["step"], saved["waited"]

    @property
    def state(self) -> dict[str, Any]:
        """Plain data that a resumed run continues with."""
        about = {"metric": self._config.metric, "mode": self._config.mode}
        return about | {"value": self.value, "step": self.step, "waited": self.waited}

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether the evaluation after `step` updates is an improvement; False if it lacks the metric."""
        name = self._config.metric
        if name not in metrics:
            self._warn(metrics)
            return False
        if self.step == step:  # it was repeated after a restart
            return True
        value = metrics[name]
        sign = 1 if self._config.mode == "max" else -1
        better = self.value is None or sign * (value - self.value) > self._config.min_delta
        if better and value == value:  # not NaN
            self.value, self.step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """Report a metric that the first evaluation lacks: it may be misspelt, or have another interval."""
        if self.value is None and not self._warned:
            self._warned = True
            near = suggest_name(self._config.metric, list(metrics))
            hint = f"; did you mean {near}?" if near else ""
            log.warning(f"{self._config.metric}: not among the metrics {', '.join(sorted(metrics)) or '(none)'}{hint}")


class Decisions:
    """What evaluations decide: the step of the checkpoint to keep, and whether the run ends.

    Every process decides alike. `saved` is the `state` in the checkpoint that the run is resumed from.
    """

    def __init__(
        self,
        keep: BestConfig | None = None,
        stop: EarlyStoppingConfig | None = None,
        saved: Mapping[str, Any] | None = None,
    ):
        saved = saved or {}
        self._keep = None if keep is None else BestSoFar(keep, saved.get("keep"))
        self._stop = None if stop is None else BestSoFar(stop, saved.get("stop"))
        self._patience = 0 if stop is None else stop.patience

    @property
    def state(self) -> dict[str, Any]:
        """Plain data for the run info of a checkpoint; empty if nothing is decided."""
        parts = {"keep": self._keep, "stop": self._stop}
        return {name: part.state for name, part in parts.items() if part is not None}

    @property
    def best_step(self) -> int | None:
        """The step whose checkpoint is kept."""
        return None if self._keep is None else self._keep.step

    @property
    def ends(self) -> bool:
        """Whether the run ends early."""
        return self._stop is not None and self._stop.waited >= self._patience

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of the evaluation after `step` updates into account."""
        if self._stop is not None:
            self._stop.update(step, metrics)
            if self.ends:
                value = "which was NaN in every evaluation"
                if self._stop.value is not None:
                    value = f"{self._stop.value:.4f} after step {self._stop.step:,}"
                log.info(
                    f"early stopping after step {step:,}: {self._patience} evaluations without an improvement of "
                    f"{self._stop.state['metric']}, {value}"
                )
        if self._keep is not None and self._keep.update(step, metrics):
            best = self._keep.state
            log.info(f"step {step}: best {best['metric']} so far, {best['value']:.4f}; its checkpoint is kept")


class Saver:
    """Saves a run's checkpoints and its exports. `run_info` and the state of `decisions` go into every checkpoint.

    `exporter` is None in a run without exports. The steps wait for what its methods do: `timer` counts it as saving.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        exporter: "Exporter | None",
        run_info: Mapping[str, Any],
        decisions: Decisions,
        trackers: Trackers,
        timer: Timer,
    ):
        self.checkpointer = checkpointer
        self.exporter = exporter
        self.decisions = decisions
        self._run_info = dict(run_info)
        self._trackers = trackers
        self._timer = timer

    def export_missed(self, state: TrainState, step: int) -> None:
        """Export the checkpoint that a run resumes from, if the run was killed before its export was complete."""
        if self.exporter is not None and self.exporter.was_missed(step):
            self.exporter.export(step, state.best_params)

    def export(self, state: TrainState, step: int) -> None:
        """Copy the parameters to the host, and export them in the background."""
        assert self.exporter is not None
        with self._timer.section(SAVING):
            self.exporter.export(step, state.best_params)

    def save(self, state: TrainState, step: int, kind: Kind, *, at_once: bool, evaluated: bool = True) -> None:
        """Save a checkpoint. `at_once`: wait until it is complete; not `evaluated`: mark the evaluation as pending."""
        with self._timer.section(SAVING):
            self._trackers.sync()
            save = self.checkpointer.save_now if at_once else self.checkpointer.save
            # earlier exports have to be complete before the checkpoint: a resumed run does not repeat them
            exported = (lambda: None) if self.exporter is None else self.exporter.under_way()
            run_info = self._run_info if evaluated else self._run_info | {EVALUATION_PENDING: True}
            run_info = run_info | ({DECISIONS: self.decisions.state} if self.decisions.state else {})
            best_step = self.decisions.best_step
            seconds = save(step, kind, state.parts, run_info, before_commit=exported, best_step=best_step)
            self._trackers.log({"checkpoint/blocking_seconds": seconds}, step)

    def log_saved(self, step: int) -> None:
        """Log the duration of the checkpoints completed since the last call, the longest if there are several."""
        with self._timer.section(HOOKS):
            if saved := self.checkpointer.take_saved():
                self._trackers.log({"checkpoint/total_seconds": max(saved)}, step)

    def close(self, others_gone: bool) -> None:
        """Complete the running checkpoint and export, in every case.

        `others_gone`: skip the checkpoint, which would wait for processes that are gone.
        """
        with self._timer.section(SAVING):
            try:
                if not others_gone:
                    self.checkpointer.close()
            finally:
                if self.exporter is not None:
                    self.exporter.finish()
