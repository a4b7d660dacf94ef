"""The training loop, top to bottom."""

import os
from collections.abc import Callable

from lmtrain.checkpoint.policies import Kind
from lmtrain.evaluation.evaluate import evaluate
from lmtrain.run.trainer import TrainerConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.tracking.console import Console
from lmtrain.tracking.goodput import COMPILE, DATA, EVALUATION, SAVING
from lmtrain.train.loop.profiler import Profiler
from lmtrain.train.loop.reporter import DivergedError, Reporter
from lmtrain.train.loop.throughput import Throughput
from lmtrain.train.program.compile import CompilingStep
from lmtrain.train.start.setup import Setup
from lmtrain.train.step.agreement import Agreement, Wishes
from lmtrain.train.step.state import TrainState


def train(setup: Setup, config: TrainerConfig, stop: StopRequest, beside: Callable[[], str] = lambda: "") -> bool:
    """Train to the last step, or until a stop is requested. Returns whether the last step was reached.

    `beside` gives what else should be said of the progress.

    The order within a step matters: metrics, then evaluation, export, and the checkpoint. What a checkpoint says is
    done has been logged and exported, so that a run killed anywhere has every metric and export once it is over.
    """
    state = setup.state
    last_step = config.num_train_steps
    throughput = Throughput(setup.work, setup.seq_len)
    agreement = Agreement(setup.processes, setup.program.layout)
    console = Console(setup.title, last_step, setup.first_step, setup.processes.is_first, setup.trackers.losses)
    reporter = Reporter(setup, config, throughput, agreement, console, beside)
    checkpointer, exporter, ledger = setup.checkpointer, setup.exporter, setup.ledger
    step = CompilingStep(setup.program.train_step)
    # of several processes one traces: JAX cannot make a trace for Perfetto in a folder where others write theirs
    profiler = Profiler(config.profile if setup.processes.is_first else None, os.path.join(setup.folder, "profiler"))
    done = setup.first_step
    ledger.begin_steps(done, setup.facts)

    def wishes() -> Wishes:
        by_clock = setup.processes.is_first and checkpointer.is_time
        return Wishes(save=by_clock, stop=stop.requested, wait=throughput.has_long_steps)

    others_gone = False
    try:
        if exporter is not None and exporter.was_missed(done):
            exporter.export(done, state.best_params)
        with console:
            while done < last_step:
                profiler.step_begins()
                try:
                    with throughput.loading, ledger.timing(DATA):
                        batch = next(setup.train_batches)
                except StoppedError:  # while waiting for data that is not there yet
                    _stop_without_data(setup, state, done, reporter)
                    break
                batch = agreement.with_batch(batch, wishes())
                with setup.program.explaining_errors():
                    if step.is_new(batch):
                        reporter.report()  # the step under way ends while the host compiles: its time would be wrong
                        with ledger.timing(COMPILE):
                            reporter.add(step.compile(state, batch))
                        ledger.write()
                        throughput.resume_clock()
                    state, metrics = step(state, batch)
                done += 1
                # This step is running now; the one before it is finished or nearly so. Reading its metrics rather than
                # this one's keeps the device busy.
                reporter.report(keep=(done, metrics))
                if agreement.waits(wishes()):
                    reporter.report()

                last = done == last_step
                granted = agreement.granted(wishes())
                evaluating = bool(setup.eval_batches) and (last or done % (config.steps_per_eval or last_step) == 0)
                kind = checkpointer.kind_at(done, last=last, asked=granted.save or granted.stop)
                exporting = exporter is not None and exporter.due(done, last)
                pauses = evaluating or kind is not None or exporting or profiler.is_last_step
                if pauses:
                    # waits for this step: its loss is checked before anything is saved
                    reporter.report(ends=last or granted.stop)
                with throughput.hooks:
                    if profiler.is_last_step and profiler.close():
                        _keep_profile(setup, profiler)
                    if evaluating:
                        with ledger.timing(EVALUATION):
                            evaluation = evaluate(setup.eval_step, state.params, setup.eval_batches)
                            if state.average is not None:
                                evaluation |= evaluate(setup.eval_step, state.average, setup.eval_batches, "eval/ema")
                        reporter.report_evaluation(done, evaluation)
                    if exporter is not None and exporting:
                        with ledger.timing(SAVING):
                            exporter.export(done, state.best_params)
                    if pauses:  # evaluating and exporting take long: do what was asked for meanwhile too
                        granted |= agreement.granted(wishes())
                        kind = checkpointer.kind_at(done, last=last, asked=granted.save or granted.stop)
                    if kind:
                        setup.trackers.sync()
                        save = checkpointer.save_now if last or granted.stop else checkpointer.save
                        # what is exported up to now is there before the checkpoint that would not export it again
                        exported = (lambda: None) if exporter is None else exporter.under_way()
                        with ledger.timing(SAVING):
                            seconds = save(done, kind, state.parts, setup.run_info, before_commit=exported)
                        setup.trackers.log({"checkpoint/blocking_seconds": seconds}, done)
                        agreement.saved(done)
                    if saved := checkpointer.take_saved():  # several if this one waited for the one before it
                        setup.trackers.log({"checkpoint/total_seconds": max(saved)}, done)
                if pauses:
                    throughput.resume_clock()
                if granted.stop:
                    break
        reporter.report_end(done)
    except DivergedError:
        raise
    except BaseException:
        others_gone = setup.processes.count > 1
        raise
    finally:
        # whatever happened: a save under way becomes complete, and what was logged is flushed
        try:
            with ledger.timing(SAVING):
                if not others_gone:  # of several processes: saving would wait for all of them
                    checkpointer.close()
        finally:
            if exporter is not None:
                with ledger.timing(SAVING):
                    exporter.finish()
            ledger.write()  # waiting for trackers is no training
            if profiler.end():
                _keep_profile(setup, profiler)
            setup.keeper.finish()
            setup.trackers.finish()
    if throughput.summary:
        log.info(throughput.summary)
    return done == last_step


def _keep_profile(setup: Setup, profiler: Profiler) -> None:
    setup.trackers.artifact(profiler.folder, f"{setup.run}-profile", "profile")


def _stop_without_data(setup: Setup, state: TrainState, done: int, reporter: Reporter) -> None:
    """Save what was trained, unless others would have to: they may not have been told to stop."""
    reporter.report(ends=True)
    if setup.processes.count > 1:
        log.warning("stopped while waiting for data: the last checkpoint is where the run goes on")
    elif done > setup.first_step:
        setup.checkpointer.save_now(done, Kind.TEMPORARY, state.parts, setup.run_info)
