"""`lmtrain train CONFIG`: train, or resume the previous run of this config.

This file starts a run, in order of dependency: 1. parse, 2. check, 3. data, 4. devices, 5. program, state and
reporting, 6. loop. Errors are reported as early as possible: JAX is imported in step 4, and if text has to be tokenized
first, the program is built before that.
"""

import sys
import time
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.load import LoadedConfig
from lmtrain.data.caches import Caches
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.prepare import find_caches, require_text, start_build, wait_for_enough
from lmtrain.run.config import RunConfig, check_evaluation
from lmtrain.run.run import Run, resolve, run_id
from lmtrain.runtime.distributed import ending_for_all, gather, start_processes
from lmtrain.runtime.errors import ReadError, RunError, counted
from lmtrain.runtime.logging import Processes, errors_in_files, log, logging_restored, start_console_log
from lmtrain.runtime.machine import is_cpu_only, keep_freed_memory
from lmtrain.runtime.output import standard_streams
from lmtrain.runtime.redact import find_secrets, redact, without
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StopRequest
from lmtrain.train.start.checks import check_before_data, check_services, check_settings, length_of_data
from lmtrain.weights.hf_config import resolve_hf
from lmtrain.weights.run_files import keep_tokenizer, open_log

if TYPE_CHECKING:
    from lmtrain.preprocess.prepare import Build
    from lmtrain.weights.trained_model import TrainedModel


def run(argv: list[str]) -> int:
    began = time.time()
    # 1. Parse: CONFIG, its includes and the command line become one validated config.
    description = "Train a model, or resume the previous run of this config."
    _, run = parse_run(Parser("train", description, lists_settings=True), argv)
    secrets = find_secrets(run.config.model_dump())
    sys.argv[1:] = [without(redact(argument), secrets) for argument in sys.argv[1:]]  # W&B saves the command line
    with standard_streams(has_result=False):
        return _start(run, began)


def train_config(config: RunConfig, name: str = "python") -> "TrainedModel":
    """Train as `lmtrain train` does, with a config made in Python; `name` replaces the file's name in the run id.

    The same call resumes the same run. Returns the model from the run's newest checkpoint. Raises `UserError` for a
    user error, and SystemExit with the command's exit code if the run was stopped (75) or failed (1).
    """
    began = time.time()
    run = Run(LoadedConfig(config, path=name), run_id(config, name))
    with standard_streams(has_result=False), logging_restored():
        code = _start(run, began)
    if code != 0:
        raise SystemExit(code)
    from lmtrain.weights.trained_model import from_checkpoint

    return from_checkpoint(run, None)


def _start(run: Run, began: float) -> int:
    # 2. Check settings before anything is read or computed, and connect to the run's other processes.
    if is_cpu_only():
        keep_freed_memory()
    require_text(run.config.data, "train")
    check_settings(run)
    processes = start_processes(run.config.trainer.distributed)
    start_console_log(processes)
    with ending_for_all(processes):
        run = resolve_hf(run)
        check_services(run, processes)
        log.info(f"run {run.id}")
        open_log(run, processes)
        with errors_in_files() if processes.count == 1 else nullcontext():  # of several, each ends with a log of it
            return _with_data(run, processes, began)


def _with_data(run: Run, processes: Processes, began: float) -> int:
    # 3. Data: missing caches are tokenized in the background; training starts as soon as there is enough.
    caches = find_caches(run.config.data, validation=run.config.trainer.evaluates)
    check_evaluation(run.config, has_validation=bool(caches.validation))
    if gather(processes, "tokenizes", not all(cache.complete for cache in caches.all))[0]:
        check_before_data(run, caches.identity, processes)
    build = start_build(run.config, caches, processes, background=True)
    try:
        wait_for_enough(run.config, caches, build)
        return _on_devices(run, caches, build, processes, began)
    except RunError as error:
        if isinstance(error, ReadError) and processes.count > 1:  # the others know nothing of it
            raise
        log.error(f"lmtrain: error: {error}")
        return 1
    finally:
        build.stop()


def _on_devices(run: Run, caches: Caches, build: "Build", processes: Processes, began: float) -> int:
    from lmtrain.checkpoint.checkpointer import Checkpointer
    from lmtrain.run.run import run_identity
    from lmtrain.sharding.mesh import find_devices
    from lmtrain.train.loop.loop import train
    from lmtrain.train.loop.setup import set_up
    from lmtrain.train.program.compile import compilation_cache
    from lmtrain.train.start.initial_state import own_checkpoint
    from lmtrain.train.start.resume import is_done

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
        identity = run_identity(config, tokenizer.identity, caches.identity)
        if own is not None and gather(processes, "done", is_done(own, config, identity, run.id))[0]:
            steps = f"{counted(own.step, 'step')}, as early stopping has ended the run"
            if own.step >= config.trainer.num_train_steps:
                steps = f"all {counted(config.trainer.num_train_steps, 'step')}"
            log.info(f"nothing to do: {own.path} has {steps} (to start a new run, set another trainer.id)")
            return 0

        # 5. Program, state and reporting; then 6. the loop runs the steps.
        setup = set_up(run, config, caches, tokenizer, checkpointer, own, processes, began)
        complete = train(setup, StopRequest(), lambda: f"cache {build.text}" if build.running else "")
    if not complete:
        log.info(f"stopped after saving to {run.checkpoints}; run the same command again to resume")
        return STOPPED_BY_SIGNAL
    log.info(f"done: checkpoints in {run.checkpoints}")
    exporter = setup.saver.exporter
    if exporter is not None and exporter.failed:
        steps = ", ".join(map(str, exporter.failed))
        log.error(f"exports of step {steps} failed; run `lmtrain export-hf` to export the checkpoints")
        return 1
    if build.running:
        log.info("the cache is not complete yet; run `lmtrain preprocess`, or train again, to resume building it")
    return 0
