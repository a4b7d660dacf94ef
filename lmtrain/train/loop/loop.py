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
from lmtrain.train.loop.profiler import Profiler
from lmtrain.train.loop.reporter import DivergedError, Reporter
from lmtrain.train.loop.saver import Saver
from lmtrain.train.program.compile import CompilingStep
from lmtrain.train.program.program import Program
from lmtrain.train.start.reporting import Reporting
from lmtrain.train.step.agreement import Agreement, StopCheck, Wishes
from lmtrain.train.step.state import TrainState


@dataclass(frozen=True)
class Setup:
    """A run that is ready for the step after `first_step` updates, with its `batches` from there on.

    `evaluation_pending` says that the checkpoint which the run was resumed from was not evaluated yet.
    """

    program: Program
    state: TrainState
    first_step: int
    batches: Iterator[Any]
    evaluation: Context
    evaluation_pending: bool
    saver: Saver
    reporting: Reporting
    processes: Processes = ALONE


def train(setup: Setup, stop: StopRequest, beside: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether all was done.

    `beside` gives what else should be said of the progress.

    The order within a step matters: metrics, then evaluation, export, and the checkpoint. What a checkpoint says is
    done has been logged and exported, so that a run killed anywhere has every metric and export once it is over.
    """
    program, saver, processes = setup.program, setup.saver, setup.processes
    trainer, timer = program.config.trainer, setup.reporting.timer
    state, done, last_step = setup.state, setup.first_step, trainer.num_train_steps
    agreement = Agreement(processes, program.layout)
    console = Console(setup.reporting.title, last_step, done, processes.is_first, setup.reporting.trackers.losses)
    evaluations = Evaluations(
        build_evaluators(trainer),
        replace(setup.evaluation, check_stop=StopCheck(processes, stop), progress=console.evaluating),
    )
    reporter = Reporter(setup.reporting, program, agreement, evaluations, saver, console, done, beside)
    step = CompilingStep(program.train_step)
    # of several processes one traces: JAX cannot make a trace for Perfetto in a folder where others write theirs
    profiler = Profiler(
        trainer.profile if processes.is_first else None, os.path.join(setup.reporting.folder, "profiler")
    )
    setup.reporting.ledger.begin_steps(done, setup.reporting.facts)

    def wishes() -> Wishes:
        by_clock = processes.is_first and saver.is_time
        return Wishes(save=by_clock, stop=stop.requested, wait=reporter.has_long_steps)

    def evaluate() -> bool:
        """Whether all that is due was evaluated; not if the run is to end before."""
        try:
            with timer.section(EVALUATION):
                found = evaluations.run(evaluations.due(done, last_step), state.params, state.ema_params, done)
        except StoppedError:
            log.info(f"the evaluation after step {done:,} is ended; it is made when the run is resumed")
            return False
        reporter.report_evaluation(done, *found)
        return True

    def close() -> None:
        """Whatever happened: a save under way becomes complete, and what was logged is flushed."""
        try:
            with timer.section(SAVING):
                saver.close(others_gone)
        finally:
            setup.reporting.ledger.write()  # waiting for trackers is no training
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
            while evaluated and done < last_step:
                profiler.step_begins()
                try:
                    with timer.section(DATA):
                        batch = next(setup.batches)
                except StoppedError:  # while waiting for data that is not there yet
                    reporter.report(ends=True)
                    if processes.count > 1:  # the others would have to save too, and may not have been told to stop
                        log.warning("stopped while waiting for data: the run resumes from the last checkpoint")
                    elif done > setup.first_step:
                        saver.save(state, done, Kind.TEMPORARY, at_once=True)
                    break
                said = agreement.on_devices(wishes())
                with program.explaining_errors():
                    if step.is_new(batch):
                        reporter.report()  # the step under way ends while the host compiles: its time would be wrong
                        with timer.section(COMPILE):
                            reporter.add(step.compile(state, batch, said))
                        setup.reporting.ledger.write()
                    state, metrics, heard = step(state, batch, said)
                done += 1
                # This step is running now; the one before it is finished or nearly so. Reading its metrics rather than
                # this one's keeps the device busy.
                reporter.report(keep=(done, metrics, heard))
                if agreement.waits(wishes()):
                    reporter.report()

                last = done == last_step
                granted = agreement.granted(wishes())
                evaluating, exporting = bool(evaluations.due(done, last_step)), saver.exports(done)
                kind = saver.kind_at(done, asked=granted.save or granted.stop)
                if evaluating or kind is not None or exporting or profiler.is_last_step:
                    # waits for this step: its loss is checked before anything is saved
                    reporter.report(ends=last or granted.stop)
                    with timer.section(HOOKS):
                        if profiler.is_last_step and profiler.close():
                            setup.reporting.artifact(profiler.folder, "profile")
                    if evaluating:
                        evaluated = evaluate()
                    with timer.section(SAVING):
                        if exporting:
                            saver.export(state, done)
                        # evaluating and exporting take long: do what was asked for meanwhile too
                        granted |= agreement.granted(wishes()) | Wishes(stop=not evaluated)
                        kind = saver.kind_at(done, asked=granted.save or granted.stop)
                        if kind is not None:
                            saver.save(state, done, kind, at_once=last or granted.stop, evaluated=evaluated)
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
    return done == last_step and evaluated
