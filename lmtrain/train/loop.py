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
from lmtrain.train.config import TrainerConfig
from lmtrain.train.setup import Setup
from lmtrain.train.throughput import Throughput


class DivergedError(RuntimeError):
    """The loss is not a finite number. Nothing was saved since it was."""


def train(setup: Setup, config: TrainerConfig, stop: StopRequest, beside: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether the last step was reached.

    `beside` gives what else the line of progress should say.

    The order within a step matters: metrics, then evaluation, then the checkpoint. What a checkpoint says is done has
    been logged, so that a run killed anywhere has every metric exactly once after it continues.
    """
    state = setup.state
    last_step = config.num_train_steps
    throughput = Throughput()
    reporter = _Reporter(setup, config, throughput, beside)
    done = setup.first_step

    exporter = setup.exporter
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
                    reporter.report()
                    if done > setup.first_step:
                        setup.checkpointer.save(done, Kind.TEMPORARY, state.parts, setup.run_info)
                    break
                with setup.program.explaining_memory():
                    state, metrics = setup.program.train_step(state, batch)
                done += 1
                # This step is running now; the one before it is finished or nearly so. Reading its metrics rather than
                # this one's keeps the device busy.
                reporter.report(keep=(done, metrics))

                last, stopping = done == last_step, stop.requested
                evaluating = bool(setup.eval_batches) and (last or done % config.steps_per_eval == 0)
                kind = setup.checkpointer.due(done, last, stopping)
                exporting = exporter is not None and exporter.due(done, last)
                if evaluating or kind or exporting:
                    reporter.report()  # waits for this step: its loss is checked before anything is saved
                if evaluating:
                    evaluation = evaluate(setup.eval_step, state.params, setup.eval_batches)
                    if state.average is not None:
                        evaluation |= evaluate(setup.eval_step, state.average, setup.eval_batches, "eval/ema")
                    reporter.report_evaluation(done, evaluation)
                if kind:
                    setup.trackers.sync()
                    setup.checkpointer.save(done, kind, state.parts, setup.run_info)
                if exporter is not None and exporting:
                    exporter.export(done, state.best_params)
                if evaluating or kind or exporting:
                    throughput.resume_clock()
                if stopping:
                    break
    except DivergedError:
        raise
    except BaseException:
        others_gone = setup.processes.count > 1
        raise
    finally:
        # whatever happened: a save under way becomes complete, and what was logged is flushed
        if not others_gone:  # of several processes: saving would wait for all of them
            setup.checkpointer.close()
        if exporter is not None:
            exporter.finish()
        setup.trackers.finish()
    if throughput.summary:
        log.info(throughput.summary)
    return done == last_step


class _Reporter:
    """Hands a step's metrics to the trackers and the terminal, one step late."""

    def __init__(self, setup: Setup, config: TrainerConfig, throughput: Throughput, beside: Callable[[], str]):
        self._beside = beside
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
