"""The training loop, top to bottom."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lmtrain.checkpoint.policies import Kind
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.registry import build_evaluators
from lmtrain.evaluation.run import Evaluations
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.tracking.console import Console
from lmtrain.tracking.timer import COMPILE, DATA, EVALUATION, HOOKS, SAVING
from lmtrain.train.loop.best import Decisions
from lmtrain.train.loop.profiler import Profiler
from lmtrain.train.loop.reporter import DivergedError, Reporter
from lmtrain.train.loop.saver import Saver
from lmtrain.train.program.compile import CompilingStep
from lmtrain.train.program.program import Program
from lmtrain.train.start.reporting import Reporting
from lmtrain.train.step.agreement import Agreement, Requests, StopCheck
from lmtrain.train.step.state import TrainState


@dataclass(frozen=True)
class Setup:
    """A run that is ready for the step after `first_step` updates, with its `batches` from that step on.

    `evaluation_pending`: the checkpoint that the run was resumed from has not been evaluated yet.
    """

    program: Program
    state: TrainState
    first_step: int
    batches: Iterator[Any]
    evaluation: Context
    evaluation_pending: bool
    saver: Saver
    decisions: Decisions
    reporting: Reporting
    processes: Processes = ALONE


def train(setup: Setup, stop: StopRequest, status: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether all steps are done and evaluated.

    `status` returns further text for the progress display.

    The order within a step matters: metrics, evaluation, export, then the checkpoint. Everything up to a checkpoint has
    been logged and exported before it is saved, so a run killed at any point ends up with every metric and export.
    """
    program, saver, processes, decisions = setup.program, setup.saver, setup.processes, setup.decisions
    trainer, timer = program.config.trainer, setup.reporting.timer
    state, done, last_step = setup.state, setup.first_step, trainer.num_train_steps
    agreement = Agreement(processes, program.layout)
    console = Console(setup.reporting.title, last_step, done, processes.is_first, setup.reporting.trackers.losses)
    evaluations = Evaluations(
        build_evaluators(trainer, program.config.eval_harness, program.config.eval_harness_steps),
        replace(setup.evaluation, check_stop=StopCheck(processes, stop), progress=console.evaluating),
    )
    reporter = Reporter(setup.reporting, program, agreement, evaluations, saver, console, done, status)
    step = CompilingStep(program.train_step)
    # only one process traces: JAX cannot write a Perfetto trace to a folder that other processes write to
    profiler = Profiler(
        trainer.profile if processes.is_first else None, os.path.join(setup.reporting.folder, "profiler")
    )
    setup.reporting.ledger.begin_steps(done, setup.reporting.facts)

    def requests() -> Requests:
        by_clock = processes.is_first and saver.is_time
        return Requests(save=by_clock, stop=stop.requested, wait=reporter.has_long_steps)

    def evaluate() -> bool:
        """Run the evaluations that are due. False if a stop request ended them."""
        try:
            with timer.section(EVALUATION):
                params, average = state.whole(state.params), state.ema_params and state.whole(state.ema_params)
                found = evaluations.run(evaluations.due(done, last_step), params, average, done)
        except StoppedError:
            log.info(f"evaluation after step {done:,} interrupted; it is repeated when the run resumes")
            return False
        reporter.report_evaluation(done, found)
        decisions.update(done, found.metrics)
        return True

    def close() -> None:
        """In every case: complete a running save, and flush the logs."""
        try:
            with timer.section(SAVING):
                saver.close(others_gone)
        finally:
            setup.reporting.ledger.write()  # time spent waiting for trackers is not training
            if profiler.end():
                setup.reporting.artifact(profiler.folder, "profile")
            setup.reporting.provenance.finish()
            setup.reporting.trackers.finish()

    others_gone = False
    evaluated = True
    try:
        saver.export_missed(state, done)
        with console:
            if setup.evaluation_pending:
                evaluated = evaluate()
            while evaluated and done < last_step and not decisions.ends:
                profiler.step_begins()
                try:
                    with timer.section(DATA):
                        batch = next(setup.batches)
                except StoppedError:  # while waiting for data that is still being tokenized
                    reporter.report(ends=True)
                    if processes.count > 1:  # the others would have to save too, and may not have received the signal
                        log.warning("stopped while waiting for data; the run resumes from the last checkpoint")
                    elif done > setup.first_step:
                        saver.save(state, done, Kind.TEMPORARY, at_once=True, decisions=decisions)
                    break
                mine = agreement.on_devices(requests())
                with program.explaining_errors():
                    if step.is_new(batch):
                        reporter.report()  # the running step ends while the host compiles: its time would be wrong
                        with timer.section(COMPILE):
                            reporter.add(step.compile(state, batch, mine))
                        setup.reporting.ledger.write()
                    state, metrics, agreed = step(state, batch, mine)
                done += 1
                # This step is running now; the previous one is (nearly) finished. Reading the metrics of the previous
                # step keeps the device busy.
                reporter.report(keep=(done, metrics, agreed))
                if agreement.waits(requests()):
                    reporter.report()

                last = done == last_step
                granted = agreement.granted(requests())
                evaluating, exporting = bool(evaluations.due(done, last_step)), saver.exports(done, last)
                kind = saver.kind_at(done, granted.save or granted.stop, last)
                if evaluating or kind is not None or exporting or profiler.is_last_step:
                    # waits for this step: its loss is checked before anything is saved
                    reporter.report(ends=last or granted.stop)
                    with timer.section(HOOKS):
                        if profiler.is_last_step and profiler.close():
                            setup.reporting.artifact(profiler.folder, "profile")
                    if evaluating:
                        evaluated = evaluate()
                        last = last or decisions.ends
                    with timer.section(SAVING):
                        if saver.exports(done, last):
                            saver.export(state, done)
                        # evaluation and export take long: also include requests made meanwhile
                        granted |= agreement.granted(requests()) | Requests(stop=not evaluated)
                        is_best = done == decisions.best_step
                        kind = saver.kind_at(done, granted.save or granted.stop or is_best, last)
                        if kind is not None:
                            at_once = last or granted.stop
                            saver.save(state, done, kind, at_once=at_once, decisions=decisions, evaluated=evaluated)
                            agreement.saved(done)
                with timer.section(HOOKS):
                    saver.log_saved(done)
                if granted.stop:
                    break
        reporter.report_end(done)
    except DivergedError:
        raise
    except BaseException:
        others_gone = processes.count > 1
        raise
    finally:
        close()
    if reporter.summary:
        log.info(reporter.summary)
    return (done == last_step or decisions.ends) and evaluated
