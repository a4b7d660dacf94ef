"""Saves a run at a step: its checkpoint and its export."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.policies import Kind
from lmtrain.tracking.open import Trackers
from lmtrain.tracking.timer import HOOKS, SAVING, Timer
from lmtrain.train.loop.best import Decisions
from lmtrain.train.start.resume import DECISIONS, EVALUATION_PENDING
from lmtrain.train.step.state import TrainState

if TYPE_CHECKING:
    from lmtrain.train.start.exporter import Exporter


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
