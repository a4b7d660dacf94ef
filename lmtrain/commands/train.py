"""`lmtrain train CONFIG`: train, or resume the previous run of this config.

This file starts a run, in order of dependency: 1. parse, 2. check, 3. data, 4. devices, 5. program, 6. state,
7. loop. Errors are reported as early as possible: JAX is imported in step 4.
"""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import RunError
from lmtrain.config.layers import Layer
from lmtrain.config.load import Loaded
from lmtrain.data.caches import Caches
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.lora.peft import check_adapter_config
from lmtrain.preprocess.prepare import Complete, plan_caches, require_text, start_build, wait_for_enough
from lmtrain.run.config import RunConfig
from lmtrain.run.identity import run_id
from lmtrain.run.run import Run, resolve
from lmtrain.runtime.accelerators import is_cpu_only
from lmtrain.runtime.distributed import ending_for_all, start_processes
from lmtrain.runtime.logging import log, logging_restored, start_console_log
from lmtrain.runtime.malloc import keep_freed_memory
from lmtrain.runtime.processes import Processes
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.tracking.open import check_trackers
from lmtrain.train.start.hf_model import hf_ref, resolve_hf
from lmtrain.train.start.run_length import length_of_data
from lmtrain.train.start.run_logs import keep_config, keep_tokenizer, open_log

if TYPE_CHECKING:
    from lmtrain.preprocess.build import Build
    from lmtrain.train.start.trained_model import TrainedModel


def run(argv: list[str]) -> int:
    began = time.time()
    # 1. Parse: CONFIG, its includes and the command line become one validated config.
    description = "Train a model, or resume the previous run of this config."
    _, run = parse_run(Parser("train", description, lists_settings=True), argv)
    return _start(run, began)


def train_config(config: RunConfig, name: str = "python") -> "TrainedModel":
    """Train as `lmtrain train` does, with a config made in Python; `name` replaces the file's name in the run id.

    The same call resumes the same run. Returns the model from the run's newest checkpoint. Raises `UserError` for a
    user error, and SystemExit with the command's exit code if the run was stopped (75) or failed (1). The program must
    be importable, with its main code under `if __name__ == "__main__":`, since text is tokenized in separate
    processes.
    """
    began = time.time()
    run = Run(Loaded(config, Layer(), name), run_id(config, name))
    with logging_restored():
        code = _start(run, began)
    if code != 0:
        raise SystemExit(code)
    from lmtrain.train.start.trained_model import from_checkpoint

    return from_checkpoint(resolve_hf(run), None)


def _start(run: Run, began: float) -> int:
    # 2. Check settings before anything is read or computed, and connect to the run's other processes.
    if is_cpu_only():
        keep_freed_memory()
    require_text(run.config.data, "train")
    if run.config.lora is not None and not list_checkpoints(run.checkpoints):  # a run that resumes ignores it
        check_adapter_config(run.config.lora)
    processes = start_processes(run.config.trainer.distributed)
    start_console_log(processes)
    with ending_for_all(processes):
        run = resolve_hf(run)
        if processes.is_first:
            check_trackers(run.config.trainer.tracker)
            if run.config.hf_upload is not None:
                from lmtrain.hf.upload import check_upload

                check_upload(run.config.hf_upload)
        log.info(f"run {run.id}")
        open_log(run, processes)
        with StopRequest() as stop:
            return _with_data(run, processes, stop, began)


def _with_data(run: Run, processes: Processes, stop: StopRequest, began: float) -> int:
    # 3. Data: missing caches are tokenized in the background; training starts as soon as there is enough.
    plans = plan_caches(run.config.data, validation=run.config.trainer.evaluates)
    build = start_build(run.config, plans, processes, background=True)
    try:
        wait_for_enough(run.config, plans, build, stop)
        return _on_devices(run, plans.caches, build, processes, stop, began)
    except StoppedError:
        log.info("stopped before training started; run the same command again to resume")
        return STOPPED_BY_SIGNAL
    except RunError as error:
        log.error(f"lmtrain: error: {error}")
        return 1
    finally:
        build.stop()


def _on_devices(
    run: Run, caches: Caches, build: "Build | Complete", processes: Processes, stop: StopRequest, began: float
) -> int:
    from lmtrain.checkpoint.checkpointer import Checkpointer
    from lmtrain.lora.model import AdaptedModel
    from lmtrain.run.identity import run_identity
    from lmtrain.sharding.mesh import find_devices
    from lmtrain.tracking.goodput import Ledger
    from lmtrain.tracking.timer import RESTORE, START_UP, Timer
    from lmtrain.train.loop.best import Decisions
    from lmtrain.train.loop.loop import Setup, train
    from lmtrain.train.loop.saver import Saver
    from lmtrain.train.program.compile import compilation_cache
    from lmtrain.train.program.program import plan_program
    from lmtrain.train.start.base import BASE, load_base
    from lmtrain.train.start.evaluation import is_pending, open_evaluation
    from lmtrain.train.start.facts import describe_run, log_program
    from lmtrain.train.start.initial_state import begin, own_checkpoint
    from lmtrain.train.start.reporting import open_reporting
    from lmtrain.train.start.resume import DECISIONS, check_identity, is_done
    from lmtrain.train.start.train_batches import TrainBatches

    # 4. Devices; and the run's folders, which are locked for this process from here on.
    config = resolve(run, length_of_data(run.config, caches)).config
    find_devices()
    with ExitStack() as stack:
        stack.enter_context(compilation_cache(config.trainer.jax_compilation_cache_dir))
        checkpointer = Checkpointer(run.checkpoints, config.trainer.checkpointer, processes)
        stack.callback(checkpointer.release)
        own = own_checkpoint(config, checkpointer, processes)
        tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)
        if processes.is_first and (own is None or own.read_run_info()["identity"]["tokenizer"] == tokenizer.identity):
            keep_tokenizer(run, tokenizer)
        if own is not None and is_done(own, config, run_identity(config, tokenizer.identity, caches.identity), run.id):
            steps = f"{own.step:,} steps, as early stopping has ended the run"
            if own.step >= config.trainer.num_train_steps:
                steps = f"all {config.trainer.num_train_steps:,} steps"
            log.info(f"nothing to do: {own.path} has {steps} (to start a new run, set another trainer.id)")
            return 0
        timer = Timer()
        ledger = Ledger(run.logs if processes.is_first else None, timer, began)
        ledger.write()  # records a start that fails before its first step too

        # 5. Program: what each device computes and holds. Unsupported settings are refused before the state exists.
        program = plan_program(config, tokenizer.vocab_size)
        log_program(program)
        batches = TrainBatches(config, caches, program.layout)
        exporter = None
        if config.hf_save_path is not None or config.hf_upload is not None:
            from lmtrain.hf.export import Origin
            from lmtrain.train.start.exporter import Exporter

            origin = Origin(run.id, caches.identity)
            exporter = Exporter(config, origin, program.model, tokenizer, program.layout, processes.is_first)

        # 6. State: from the run's own checkpoint, from another model, or newly initialized.
        with timer.section(START_UP if own is None else RESTORE):
            base = None
            if isinstance(program.model, AdaptedModel):
                if own is not None:  # first: another base_dtype would look like another base
                    check_identity(own, run_identity(config, tokenizer.identity, caches.identity))
                saved = None if own is None else own.read_run_info().get(BASE)
                base = load_base(
                    config, program.model, program.layout, hf_ref(config), tokenizer.identity, saved, processes
                )
            run_info = describe_run(config, run.id, tokenizer.identity, caches, program, base)
            state, first_step = begin(program, own, run_info, hf_ref(config), processes, base)
        if processes.is_first:
            keep_config(run)  # not before: the config of a refused start is not the run's

        # 7. Loop: set up reporting, evaluation and saving; then run the steps.
        reporting = open_reporting(run, program, run_info, first_step, timer, ledger, processes)
        setup = Setup(
            program,
            state,
            first_step,
            batches.after(first_step),
            open_evaluation(program, caches, tokenizer, run.logs, processes),
            is_pending(own, reporting.trackers, processes),
            Saver(checkpointer, exporter, run_info, reporting.trackers, config.trainer.num_train_steps),
            Decisions.of(config.trainer, {} if own is None else own.read_run_info().get(DECISIONS, {})),
            reporting,
            processes,
        )
        complete = train(setup, stop, lambda: f"cache {build.text}" if build.running else "")
    if not complete:
        log.info(f"stopped after saving to {run.checkpoints}; run the same command again to resume")
        return STOPPED_BY_SIGNAL
    log.info(f"done: checkpoints in {run.checkpoints}")
    if exporter is not None and exporter.failed:
        steps = ", ".join(map(str, exporter.failed))
        log.error(f"exports of step {steps} failed; run `lmtrain export-hf` to export the checkpoints")
        return 1
    if build.running:
        log.info("the cache is not complete yet; run `lmtrain preprocess`, or train again, to resume building it")
    return 0
