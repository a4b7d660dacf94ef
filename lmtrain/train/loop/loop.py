"""The training loop, top to bottom."""

import os
from collections.abc import Callable
from dataclasses import replace

from lmtrain.checkpoint.policies import Kind
from lmtrain.evaluation.run import Evaluations
from lmtrain.run.trainer import TrainerConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.tracking.console import Console
from lmtrain.tracking.timer import COMPILE, DATA, EVALUATION, HOOKS, SAVING
from lmtrain.train.loop.profiler import Profiler
from lmtrain.train.loop.reporter import DivergedError, Reporter
from lmtrain.train.loop.throughput import Throughput
from lmtrain.train.program.compile import CompilingStep
from lmtrain.train.start.setup import EVALUATION_PENDING, Setup
from lmtrain.train.step.agreement import Agreement, StopCheck, Wishes
from lmtrain.train.step.state import TrainState


def train(setup: Setup, config: TrainerConfig, stop: StopRequest, beside: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether all was done.

    `beside` gives what else should be said of the progress.

    The order within a step matters: metrics, then evaluation, export, and the checkpoint. What a checkpoint says is
    done has been logged and exported, so that a run killed anywhere has every metric and export once it is over.
    """
    state = setup.state
    last_step = config.num_train_steps
    timer, checkpointer, exporter = setup.timer, setup.checkpointer, setup.exporter
    throughput = Throughput(setup.work, setup.seq_len, timer)
    agreement = Agreement(setup.processes, setup.program.layout)
    console = Console(setup.title, last_step, setup.first_step, setup.processes.is_first, setup.trackers.losses)
    check_stop = StopCheck(setup.processes, stop)
    evaluations = Evaluations(
        setup.evaluators, replace(setup.evaluation, check_stop=check_stop, progress=console.evaluating)
    )
    reporter = Reporter(setup, config, throughput, agreement, evaluations, console, beside)
    step = CompilingStep(setup.program.train_step)
    # of several processes one traces: JAX cannot make a trace for Perfetto in a folder where others write theirs
    profiler = Profiler(config.profile if setup.processes.is_first else None, os.path.join(setup.folder, "profiler"))
    done = setup.first_step
    setup.ledger.begin_steps(done, setup.facts)

    def wishes() -> Wishes:
        by_clock = setup.processes.is_first and checkpointer.is_time
        return Wishes(save=by_clock, stop=stop.requested, wait=throughput.has_long_steps)

    def evaluate() -> bool:
        """Whether all that is due was evaluated; not if the run is to end before."""
        try:
            with timer.section(EVALUATION):
                found = evaluations.run(evaluations.due(done, last_step), state.params, state.average, done)
        except StoppedError:
            log.info(f"the evaluation after step {done:,} is ended; it is made when the run is resumed")
            return False
        reporter.report_evaluation(done, *found)
        return True

    others_gone = False
    evaluated = True
    try:
        if exporter is not None and exporter.was_missed(done):
            exporter.export(done, state.best_params)
        with console:
            if setup.evaluation_pending:
                evaluated = evaluate()
            while evaluated and done < last_step:
                profiler.step_begins()
                try:
                    with timer.section(DATA):
                        batch = next(setup.train_batches)
                except StoppedError:  # while waiting for data that is not there yet
                    _stop_without_data(setup, state, done, reporter)
                    break
                said = agreement.on_devices(wishes())
                with setup.program.explaining_errors():
                    if step.is_new(batch):
                        reporter.report()  # the step under way ends while the host compiles: its time would be wrong
                        with timer.section(COMPILE):
                            reporter.add(step.compile(state, batch, said))
                        setup.ledger.write()
                    state, metrics, heard = step(state, batch, said)
                done += 1
                # This step is running now; the one before it is finished or nearly so. Reading its metrics rather than
                # this one's keeps the device busy.
                reporter.report(keep=(done, metrics, heard))
                if agreement.waits(wishes()):
                    reporter.report()

                last = done == last_step
                granted = agreement.granted(wishes())
                evaluating = bool(evaluations.due(done, last_step))
                kind = checkpointer.kind_at(done, last=last, asked=granted.save or granted.stop)
                exporting = exporter is not None and exporter.due(done, last)
                if evaluating or kind is not None or exporting or profiler.is_last_step:
                    # waits for this step: its loss is checked before anything is saved
                    reporter.report(ends=last or granted.stop)
                    with timer.section(HOOKS):
                        if profiler.is_last_step and profiler.close():
                            _keep_profile(setup, profiler)
                    if evaluating:
                        evaluated = evaluate()
                    with timer.section(SAVING):
                        if exporter is not None and exporting:
                            exporter.export(done, state.best_params)
                        # evaluating and exporting take long: do what was asked for meanwhile too
                        granted |= agreement.granted(wishes()) | Wishes(stop=not evaluated)
                        kind = checkpointer.kind_at(done, last=last, asked=granted.save or granted.stop)
                        if kind is not None:
                            ends = last or granted.stop
                            _save(setup, state, done, kind, at_once=ends, evaluated=evaluated)
                            agreement.saved(done)
                with timer.section(HOOKS):
                    if saved := checkpointer.take_saved():  # several if this one waited for the one before it
                        setup.trackers.log({"checkpoint/total_seconds": max(saved)}, done)
                if granted.stop:
                    break
        reporter.report_end(done)
    except DivergedError:
        raise
    except BaseException:
        others_gone = setup.processes.count > 1
        raise
    finally:
        _close(setup, profiler, others_gone)
    if throughput.summary:
        log.info(throughput.summary)
    return done == last_step and evaluated


def _save(setup: Setup, state: TrainState, done: int, kind: Kind, *, at_once: bool, evaluated: bool) -> None:
    """`at_once` waits until the checkpoint is complete. One of a step that is not `evaluated` says so."""
    setup.trackers.sync()
    save = setup.checkpointer.save_now if at_once else setup.checkpointer.save
    # what is exported up to now is there before the checkpoint that would not export it again
    exported = (lambda: None) if setup.exporter is None else setup.exporter.under_way()
    run_info = setup.run_info if evaluated else setup.run_info | {EVALUATION_PENDING: True}
    seconds = save(done, kind, state.parts, run_info, before_commit=exported)
    setup.trackers.log({"checkpoint/blocking_seconds": seconds}, done)


def _close(setup: Setup, profiler: Profiler, others_gone: bool) -> None:
    """Whatever happened: a save under way becomes complete, and what was logged is flushed."""
    try:
        with setup.timer.section(SAVING):
            if not others_gone:  # of several processes: saving would wait for all of them
                setup.checkpointer.close()
    finally:
        if setup.exporter is not None:
            with setup.timer.section(SAVING):
                setup.exporter.finish()
        setup.ledger.write()  # waiting for trackers is no training
        if profiler.end():
            _keep_profile(setup, profiler)
        setup.keeper.finish()
        setup.trackers.finish()


def _keep_profile(setup: Setup, profiler: Profiler) -> None:
    setup.trackers.artifact(profiler.folder, f"{setup.run}-profile", "profile")


def _stop_without_data(setup: Setup, state: TrainState, done: int, reporter: Reporter) -> None:
    """Save what was trained, unless others would have to: they may not have been told to stop."""
    reporter.report(ends=True)
    if setup.processes.count > 1:
        log.warning("stopped while waiting for data: the last checkpoint is where the run goes on")
    elif done > setup.first_step:
        setup.checkpointer.save_now(done, Kind.TEMPORARY, state.parts, setup.run_info)
