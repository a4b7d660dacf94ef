"""What is due after a step: an evaluation, an export, a checkpoint, the end of the run."""

from typing import Any

from lmtrain.checkpoint.config import Kind
from lmtrain.evaluation.interface import Evaluator
from lmtrain.evaluation.run import Evaluations
from lmtrain.runtime.signals import StopRequest
from lmtrain.train.loop.saver import Saver
from lmtrain.train.step.norms import Agreement, Requests

# The next step starts only after a step that takes longer than this has finished: this costs the milliseconds in which
# the host prepares the next step, and a stop signal takes effect one step earlier.
LONG_STEP_SECONDS = 5.0


class Due:
    """Answers after each step: evaluate? export? save? stop? All processes of a run get the same answers.

    They follow from the number of the step, from what evaluations decide, and from requests: for a checkpoint by the
    clock, or to stop by a signal. Call `step_done` after every step; `step` counts finished updates.
    """

    def __init__(
        self, last_step: int, evaluations: Evaluations, saver: Saver, agreement: Agreement, stop: StopRequest
    ) -> None:
        self._last_step = last_step
        self._evaluations = evaluations
        self._checkpointer, self._exporter, self._decisions = saver.checkpointer, saver.exporter, saver.decisions
        self._agreement = agreement
        self._stop = stop
        self._granted = Requests()
        self._has_long_steps = True  # until a short step is known
        self.evaluated = True  # set it to False if a stop request has ended an evaluation

    def requests(self) -> Requests:
        """The requests of this process."""
        return Requests(self._checkpointer.is_due, self._stop.requested, self._has_long_steps)

    def on_devices(self) -> Any:
        """The requests of this process, as an input of the next step."""
        return self._agreement.on_devices(self.requests())

    def learn(self, step: int, requests: Any, seconds: float) -> None:
        """Record the requests of all processes, as a step returned them, and the seconds that the step took."""
        self._agreement.learn(step, requests)
        self._has_long_steps = seconds > LONG_STEP_SECONDS

    def waits(self) -> bool:
        """Whether the running step has to finish before the host continues."""
        return self._agreement.waits(self.requests())

    def step_done(self) -> None:
        """Take the requests for this step, instead of those for the step before."""
        self._granted = self._agreement.granted(self.requests())

    def anything(self, step: int) -> bool:
        """Whether an evaluation, an export or a checkpoint is due."""
        return bool(self.evaluations(step)) or self.export(step) or self._save(step) is not None

    def evaluations(self, step: int) -> list[Evaluator]:
        """The evaluations that are due."""
        return self._evaluations.due(step, self._last_step)

    def export(self, step: int) -> bool:
        """Whether an export is due."""
        return self._exporter is not None and self._exporter.due(step, self._is_last(step))

    def save(self, step: int) -> Kind | None:
        """The kind of the checkpoint that is due, None for none. An evaluation and an export come before it."""
        self._granted |= self._agreement.granted(self.requests())  # those take long: requests made meanwhile count
        return self._save(step)

    def saved(self, step: int) -> None:
        """Mark the requests for a checkpoint up to this step as fulfilled."""
        self._agreement.saved(step)

    def stop(self, step: int) -> bool:
        """Whether the run ends after this step."""
        return self._is_last(step) or self._granted.stop or not self.evaluated

    def complete(self, step: int) -> bool:
        """Whether the run has done, after `step` updates, all that it is to do."""
        return self._is_last(step) and self.evaluated

    def next_evaluation(self, step: int) -> int | None:
        """The next step after `step` with an evaluation; None if there is none."""
        return self._evaluations.next_after(step, self._last_step)

    def next_save(self, step: int, seconds_per_step: float) -> int | None:
        """The estimated step of the next checkpoint; None after the last."""
        if step >= self._last_step:
            return None
        by_steps = self._checkpointer.next_permanent(step, self._last_step)
        by_clock = self._checkpointer.seconds_to_next
        if by_clock is None:
            return by_steps
        return min(by_steps, step + 1 + int(by_clock / max(seconds_per_step, 1e-9)))

    def _is_last(self, step: int) -> bool:
        return step >= self._last_step or self._decisions.ends

    def _save(self, step: int) -> Kind | None:
        asked = self._granted.save or self._granted.stop or not self.evaluated or step == self._decisions.best_step
        return self._checkpointer.kind_at(step, last=self._is_last(step), asked=asked)
