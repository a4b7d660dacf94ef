"""The training loop, top to bottom; and its profiler."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax

from lmtrain.checkpoint.config import Kind
from lmtrain.evaluation.run import Evaluations, build_evaluators
from lmtrain.run.trainer import ProfilerConfig
from lmtrain.runtime.distributed import StopCheck
from lmtrain.runtime.errors import counted
from lmtrain.runtime.logging import log
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.tracking.console import Console
from lmtrain.tracking.goodput import COMPILE, DATA, EVALUATION, HOOKS
from lmtrain.train.loop.due import Due
from lmtrain.train.loop.reporter import DivergedError, Reporter
from lmtrain.train.loop.setup import Setup
from lmtrain.train.program.compile import CompilingStep
from lmtrain.train.step.norms import Agreement
from lmtrain.train.step.state import TrainState


class Profiler:
    """Writes a trace of the steps that `config` selects, counted from this start, to `folder`; none without a config.

    Errors are logged and do not affect the run.
    """

    def __init__(self, config: ProfilerConfig | None, folder: str):
        self._config = config
        self.folder = folder
        self._steps = 0
        self._tracing = False

    def step_begins(self) -> None:
        """Called before each step; starts the trace when it is due."""
        self._steps += 1
        if self._config is None or self._steps != self._config.start_step + 1:
            return
        try:
            os.makedirs(self.folder, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            # XLA's tracer of Python sets a hook in all threads, and crashes the process if one is just being created
            options.python_tracer_level = 0
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True, profiler_options=options)
        except Exception as error:  # any error of the disk or the driver
            log.warning(f"profiler: cannot write a trace to {self.folder}: {error}; training continues without it")
            return
        self._tracing = True
        log.info(f"profiling {counted(self._config.num_steps, 'step')} into {self.folder}")

    @property
    def is_last_step(self) -> bool:
        """Whether the trace is complete with the last started step: call `close` when that step is finished."""
        if not self._tracing or self._config is None:
            return False
        return self._steps >= self._config.start_step + self._config.num_steps

    def end(self) -> bool:
        """Like `close`, at the end of a run; logs a warning if the trace never started."""
        if self._config is not None and self._steps <= self._config.start_step:
            log.warning(
                f"profiler: no trace written, as only {counted(self._steps, 'step')} ran after this start and "
                f"start_step is {self._config.start_step}"
            )
        return self.close()

    def close(self) -> bool:
        """Stop the running trace. Returns whether a trace was written."""
        if not self._tracing:
            return False
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            log.warning(f"profiler: the trace could not be written to {self.folder}: {error}; training continues")
            return False
        log.info(
            f"profile: {self.folder}; open it with `tensorboard --logdir {self.folder}` (and xprof), or its "
            "perfetto_trace.json.gz at ui.perfetto.dev"
        )
        return True


def train(setup: Setup, stop: StopRequest, status: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether all steps are done and evaluated.

    Until the first step has run, signals keep the effect that they have at the call. `status` returns further text for
    the progress display.

    The order within a step matters: metrics, evaluation, export, then the checkpoint. Everything up to a checkpoint has
    been logged and exported before it is saved, so a run killed at any point ends up with every metric and export.
    """
    loop = _Loop(setup, stop, status)
    due, reporter, saver = loop.due, loop.reporter, setup.saver
    state, step = setup.start.state, setup.start.step
    with loop.closing(), loop.console:
        saver.export_missed(state, step)
        if setup.start.evaluation_pending:
            loop.evaluate(state, step)
        while not due.stop(step):
            try:
                batch = loop.next_batch()
            except StoppedError:  # while waiting for data that is still being tokenized
                loop.save_interrupted(state, step)
                break
            state, outputs = loop.run_step(state, batch)
            step += 1
            # This step is running now; the previous one is (nearly) finished. Reading the metrics of the previous
            # step keeps the device busy.
            reporter.report(keep=(step, *outputs))
            if due.waits():
                reporter.report()
            due.step_done()
            if due.anything(step) or loop.profiler.is_last_step:
                # waits for this step: its loss is checked before anything is saved
                reporter.report(ends=due.stop(step))
                loop.close_profile()
                if due.evaluations(step):
                    loop.evaluate(state, step)
                if due.export(step):
                    saver.export(state, step)
                if (kind := due.save(step)) is not None:
                    saver.save(state, step, kind, at_once=due.stop(step), evaluated=due.evaluated)
                    due.saved(step)
            saver.log_saved(step)
        reporter.report_end(step)
    if reporter.summary:
        log.info(reporter.summary)
    return due.complete(step)


class _Loop:
    """The parts of a training loop, and what each of its lines does."""

    def __init__(self, setup: Setup, stop: StopRequest, status: Callable[[], str]):
        program, reporting, processes = setup.program, setup.reporting, setup.evaluation.processes
        trainer, last_step = program.config.trainer, program.config.trainer.num_train_steps
        self._setup = setup
        self._stop = stop
        self._processes = processes
        self._section = reporting.timer.section
        self.console = Console(last_step, setup.start.step, processes.is_first)
        self._evaluations = Evaluations(
            build_evaluators(trainer, program.config.eval_harness, program.config.eval_harness_steps),
            replace(setup.evaluation, check_stop=StopCheck(processes, stop), progress=self.console.evaluating),
        )
        self.due = Due(last_step, self._evaluations, setup.saver, Agreement(processes, program.layout), stop)
        self.reporter = Reporter(reporting, program, self.due, self.console, setup.start.step, status)
        self._train_step = CompilingStep(program.train_step)
        self._has_run = False
        # only one process traces: JAX cannot write a Perfetto trace to a folder that other processes write to
        self.profiler = Profiler(
            trainer.profile if processes.is_first else None, os.path.join(reporting.folder, "profiler")
        )
        reporting.ledger.begin_steps(setup.start.step, reporting.facts)

    def next_batch(self) -> Any:
        """The batch of the next step. Raises `StoppedError` if a signal ended the build that it waits for."""
        self.profiler.step_begins()
        with self._section(DATA):
            return next(self._setup.batches)

    def run_step(self, state: TrainState, batch: Any) -> tuple[TrainState, tuple[Any, Any]]:
        """Start a step; before that, compile the program for batches of a new size. Returns its outputs on devices."""
        program, requests = self._setup.program, self.due.on_devices()
        with program.explaining_errors():
            if self._train_step.is_new(batch):
                self.reporter.report()  # the running step ends while the host compiles: its time would be wrong
                with self._section(COMPILE):
                    self.reporter.add(self._train_step.compile(state, batch, requests))
                self._setup.reporting.ledger.write()
            state, *outputs = self._train_step(state, batch, requests)
            if not self._has_run:
                jax.block_until_ready(outputs)
                self._stop.begin()  # from here on there is something to save
                self._has_run = True
        return state, tuple(outputs)

    def evaluate(self, state: TrainState, step: int) -> None:
        """Run the evaluations that are due, and report and record what they find, unless a stop request ends them."""
        try:
            with self._section(EVALUATION):
                params, average = state.with_base(state.params), state.ema_params and state.with_base(state.ema_params)
                findings = self._evaluations.run(self.due.evaluations(step), params, average, step)
        except StoppedError:
            log.info(f"evaluation after step {step:,} interrupted; it is repeated when the run resumes")
            self.due.evaluated = False
            return
        self.reporter.report_evaluation(step, findings)
        self._setup.saver.decisions.update(step, findings.metrics)

    def close_profile(self) -> None:
        """Write the profiler's trace if it is complete with this step."""
        with self._section(HOOKS):
            if self.profiler.is_last_step and self.profiler.close():
                self._setup.reporting.artifact(self.profiler.folder, "profile")

    def save_interrupted(self, state: TrainState, step: int) -> None:
        """Save the steps of this start when a signal ends the run while it waits for data."""
        self.reporter.report(ends=True)
        if self._processes.count > 1:  # the others would have to save too, and may not have received the signal
            log.warning("stopped while waiting for data; the run resumes from the last checkpoint")
        elif self._has_run:
            self._setup.saver.save(state, step, Kind.TEMPORARY, at_once=True)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """In every case: complete a running save, and flush the logs."""
        reporting, others_gone = self._setup.reporting, False
        try:
            yield
        except DivergedError:  # in all processes
            raise
        except BaseException:
            others_gone = self._processes.count > 1
            raise
        finally:
            try:
                self._setup.saver.close(others_gone)
            finally:
                reporting.ledger.write()  # time spent waiting for trackers is not training
                if self.profiler.end():
                    reporting.artifact(self.profiler.folder, "profile")
                reporting.finish()
                self._stop.end()
