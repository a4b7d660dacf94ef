"""Saves a run at a step: its checkpoint and its export."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.policies import Kind
from lmtrain.tracking.open import Trackers
from lmtrain.train.loop.best import Decisions
from lmtrain.train.start.resume import DECISIONS, EVALUATION_PENDING
from lmtrain.train.step.state import TrainState

if TYPE_CHECKING:
    from lmtrain.train.start.exporter import Exporter


class Saver:
    """Saves a run's checkpoints and its exports. `run_info` goes into every checkpoint."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        exporter: "Exporter | None",
        run_info: Mapping[str, Any],
        trackers: Trackers,
        num_train_steps: int,
    ):
        self._checkpointer = checkpointer
        self._exporter = exporter
        self._run_info = dict(run_info)
        self._trackers = trackers
        self._last = num_train_steps

    def export_missed(self, state: TrainState, step: int) -> None:
        """Export the checkpoint that a run resumes from, if the run was killed before its export was complete."""
        if self._exporter is not None and self._exporter.was_missed(step):
            self._exporter.export(step, state.best_params)

    @property
    def is_time(self) -> bool:
        """Whether a checkpoint is due by the clock."""
        return self._checkpointer.is_time

    def kind_at(self, step: int, asked: bool, last: bool) -> Kind | None:
        """The kind of checkpoint to save after `step` updates, if any; `asked`: one was requested; `last`: the end."""
        return self._checkpointer.kind_at(step, last=last, asked=asked)

    def exports(self, step: int, last: bool) -> bool:
        """Whether the parameters after `step` updates are to be exported."""
        return self._exporter is not None and self._exporter.due(step, last)

    def next_save(self, step: int, seconds_per_step: float) -> int | None:
        """The estimated step of the next checkpoint; None after the last."""
        if step >= self._last:
            return None
        by_steps = self._checkpointer.next_permanent(step, self._last)
        by_clock = self._checkpointer.seconds_to_next
        if by_clock is None:
            return by_steps
        return min(by_steps, step + 1 + int(by_clock / max(seconds_per_step, 1e-9)))

    def export(self, state: TrainState, step: int) -> None:
        """Copy the parameters to the host, and export them in the background."""
        assert self._exporter is not None
        self._exporter.export(step, state.best_params)

    def save(
        self,
        state: TrainState,
        step: int,
        kind: Kind,
        *,
        at_once: bool,
        decisions: Decisions,
        evaluated: bool = True,
    ) -> None:
        """Save a checkpoint. `at_once`: wait until it is complete; not `evaluated`: mark the evaluation as pending."""
        self._trackers.sync()
        save = self._checkpointer.save_now if at_once else self._checkpointer.save
        # earlier exports have to be complete before the checkpoint: a resumed run does not repeat them
        exported = (lambda: None) if self._exporter is None else self._exporter.under_way()
        run_info = self._run_info if evaluated else self._run_info | {EVALUATION_PENDING: True}
        run_info = run_info | ({DECISIONS: decisions.state} if decisions.state else {})
        seconds = save(step, kind, state.parts, run_info, before_commit=exported, best_step=decisions.best_step)
        self._trackers.log({"checkpoint/blocking_seconds": seconds}, step)

    def log_saved(self, step: int) -> None:
        """Log the duration of the checkpoints completed since the last call, the longest if there are several."""
        if saved := self._checkpointer.take_saved():
            self._trackers.log({"checkpoint/total_seconds": max(saved)}, step)

    def close(self, others_gone: bool) -> None:
        """Complete the running checkpoint and export, in every case.

        `others_gone`: skip the checkpoint, which would wait for processes that are gone.
        """
        try:
            if not others_gone:
                self._checkpointer.close()
        finally:
            if self._exporter is not None:
                self._exporter.finish()
