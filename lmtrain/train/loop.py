"""The training loop, top to bottom."""

import math
from collections.abc import Callable
from typing import Any

import jax

from lmtrain.checkpoint.policies import Kind
from lmtrain.evaluation.evaluate import describe_evaluation, evaluate
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.train.agreement import Agreement, Wishes
from lmtrain.train.config import TrainerConfig
from lmtrain.train.setup import Setup
from lmtrain.train.state import TrainState
from lmtrain.train.throughput import Throughput


class DivergedError(RuntimeError):
    """The loss is not a finite number. Nothing was saved since it was."""


def train(setup: Setup, config: TrainerConfig, stop: StopRequest, beside: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether the last step was reached.

    `beside` gives what else the line of progress should say.

    The order within a step matters: metrics, then evaluation, export, and the checkpoint. What a checkpoint says is
    done has been logged and exported, so that a run killed anywhere has every metric and export once it is over.
    """
    state = setup.state
    last_step = config.num_train_steps
    throughput = Throughput()
    agreement = Agreement(setup.processes, setup.program.layout)
    reporter = _Reporter(setup, config, throughput, agreement, beside)
    checkpointer, exporter = setup.checkpointer, setup.exporter
    done = setup.first_step

    others_gone = False
    try:
        if exporter is not None and exporter.was_missed(done):
            exporter.export(done, state.best_params)
        with Progress("train", last_step, setup.first_step, quiet=not setup.processes.is_first) as progress:
            reporter.progress = progress
            while done < last_step:
                try:
                    with throughput.loading:
                        batch = next(setup.train_batches)
                except StoppedError:  # while waiting for data that is not there yet
                    _stop_without_data(setup, state, done, reporter)
                    break
                wishes = Wishes(save=setup.processes.is_first and checkpointer.is_time, stop=stop.requested)
                with setup.program.explaining_memory():
                    state, metrics = setup.program.train_step(state, agreement.with_batch(batch, wishes))
                done += 1
                # This step is running now; the one before it is finished or nearly so. Reading its metrics rather than
                # this one's keeps the device busy.
                reporter.report(keep=(done, metrics))

                last = done == last_step
                granted = agreement.granted(wishes)
                evaluating = bool(setup.eval_batches) and (last or done % config.steps_per_eval == 0)
                kind = checkpointer.kind_at(done, last=last, asked=granted.save or granted.stop)
                exporting = exporter is not None and exporter.due(done, last)
                if evaluating or kind or exporting:
                    reporter.report()  # waits for this step: its loss is checked before anything is saved
                if evaluating:
                    evaluation = evaluate(setup.eval_step, state.params, setup.eval_batches)
                    if state.average is not None:
                        evaluation |= evaluate(setup.eval_step, state.average, setup.eval_batches, "eval/ema")
                    reporter.report_evaluation(done, evaluation)
                if exporter is not None and exporting:
                    exporter.export(done, state.best_params)
                if kind:
                    setup.trackers.sync()
                    save = checkpointer.save_now if last or granted.stop else checkpointer.save
                    # what is exported up to now is there before the checkpoint that would not export it again
                    exported = (lambda: None) if exporter is None else exporter.under_way()
                    seconds = save(done, kind, state.parts, setup.run_info, before_commit=exported)
                    setup.trackers.log({"checkpoint/blocking_seconds": seconds}, done)
                    agreement.saved(done)
                for seconds in checkpointer.take_saved():
                    setup.trackers.log({"checkpoint/total_seconds": seconds}, done)
                if evaluating or kind or exporting:
                    throughput.resume_clock()
                if granted.stop:
                    break
    except DivergedError:
        raise
    except BaseException:
        others_gone = setup.processes.count > 1
        raise
    finally:
        # whatever happened: a save under way becomes complete, and what was logged is flushed
        try:
            if not others_gone:  # of several processes: saving would wait for all of them
                checkpointer.close()
        finally:
            if exporter is not None:
                exporter.finish()
            setup.trackers.finish()
    if throughput.summary:
        log.info(throughput.summary)
    return done == last_step


def _stop_without_data(setup: Setup, state: TrainState, done: int, reporter: "_Reporter") -> None:
    """Save what was trained, unless others would have to: they may not have been told to stop."""
    reporter.report()
    if setup.processes.count > 1:
        log.warning("stopped while waiting for data: the last checkpoint is where the run goes on")
    elif done > setup.first_step:
        setup.checkpointer.save_now(done, Kind.TEMPORARY, state.parts, setup.run_info)


class _Reporter:
    """Hands a step's metrics to the trackers and the terminal, one step late."""

    def __init__(
        self,
        setup: Setup,
        config: TrainerConfig,
        throughput: Throughput,
        agreement: Agreement,
        beside: Callable[[], str],
    ):
        self._beside = beside
        self._agreement = agreement
        self._trackers = setup.trackers
        self._program = setup.program
        self._sizes, self._seq_len = setup.batch_sizes, setup.seq_len
        self._config = config
        self._throughput = throughput
        self._waiting: tuple[int, Any] | None = None
        self._evaluation = ""
        self.progress: Progress | None = None

    def report(self, keep: tuple[int, Any] | None = None) -> None:
        """Report the step that is waiting, and let `keep` wait in its place."""
        waiting, self._waiting = self._waiting, keep
        if waiting is None:
            return
        step, on_device = waiting
        with self._program.explaining_memory():  # what fails on the device is told here
            metrics = {name: float(value) for name, value in jax.device_get(on_device).items()}
        self._agreement.learn(step, metrics)
        metrics |= self._throughput.step_done(self._sizes.at(step - 1) * self._seq_len)
        self._trackers.log(metrics, step)
        self._check(step, metrics["train/loss"])
        if self.progress is not None:
            text = (
                f"{step}/{self._config.num_train_steps}, loss {metrics['train/loss']:.3f}{self._evaluation}, "
                f"lr {metrics['train/learning_rate']:.2e}, {metrics['throughput/tokens_per_second']:,.0f} tokens/s"
                f"{self._beside()}"
            )
            first_or_last = step in (1, self._config.num_train_steps)
            self.progress.update(step, text, force=first_or_last)

    def report_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._trackers.log(metrics, step)
        self._evaluation = f", eval {metrics['eval/loss']:.3f}"
        log.info(f"step {step}: {describe_evaluation(metrics)}")

    def _check(self, step: int, loss: float) -> None:
        if (math.isnan(loss) and self._config.crash_on_nan) or (math.isinf(loss) and self._config.crash_on_inf):
            raise DivergedError(
                f"the loss of step {step} is {loss}; nothing was saved since it was finite. Its batch are sequences "
                f"{self._sizes.before(step - 1):,} to {self._sizes.before(step) - 1:,} of the training data. Lower "
                "optimizer.learning_rate or lengthen optimizer.warmup; delete the last checkpoints if it happens again"
            )
