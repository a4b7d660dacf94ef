"""`lmtrain train CONFIG`: train, or go on where the last run of the same config stopped."""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from lmtrain.commands.arguments import Parser, Run, parse_run
from lmtrain.commands.caches import Plans, plan_caches, require_text, start_build, wait
from lmtrain.commands.hf_model import hf_ref, resolve_hf
from lmtrain.commands.run_logs import keep_tokenizer, run_logs
from lmtrain.commands.trained_model import TrainedModel, from_checkpoint
from lmtrain.config.errors import UserError
from lmtrain.config.layers import Layer
from lmtrain.config.load import Loaded
from lmtrain.config.show import show
from lmtrain.data.caches import Caches, check_batch, needs_all, plan_steps
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.upload import check_upload
from lmtrain.preprocess.build import Build
from lmtrain.run.config import RunConfig, data_seed, resolved
from lmtrain.run.identity import run_id
from lmtrain.runtime.accelerators import is_cpu_only
from lmtrain.runtime.distributed import ending_for_all, start_processes
from lmtrain.runtime.files import remove_temporaries, write_atomically
from lmtrain.runtime.logging import log, start_console_log, start_file_log
from lmtrain.runtime.malloc import keep_freed_memory
from lmtrain.runtime.processes import Processes
from lmtrain.runtime.run_path import fill_run_id
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StoppedError, StopRequest
from lmtrain.tracking.open import check_trackers


def run(argv: list[str]) -> int:
    began = time.time()
    description = "Train a model, or go on where the last run of the same config stopped."
    run = parse_run(Parser("train", description, lists_settings=True), argv)
    return _start(run, began)


def train_config(config: RunConfig, name: str = "python") -> TrainedModel:
    """What `lmtrain train` does, for a config made in Python; `name` stands for the file's in the run's id.

    The same call continues the same run. Returns the model from the run's newest checkpoint. Raises `UserError` for a
    mistake, and SystemExit with the command's exit code if the run was stopped (75) or failed (1). The program has to
    be importable: with `if __name__ == "__main__":` round what starts it, since text is tokenized in processes of
    their own.
    """
    began = time.time()
    run = Run(argparse.Namespace(), Loaded(config, Layer({}), name), run_id(config, name))
    code = _start(run, began)
    if code != 0:
        raise SystemExit(code)
    return from_checkpoint(resolve_hf(run), None)


def _start(run: Run, began: float) -> int:
    if is_cpu_only():
        keep_freed_memory()
    require_text(run.config.data, "train")
    processes = start_processes(run.config.trainer.distributed)
    start_console_log(processes)
    with ending_for_all(processes):
        return _run(run, processes, began)


def _run(run: Run, processes: Processes, began: float) -> int:
    run = resolve_hf(run)
    config = run.config
    if processes.is_first:
        check_trackers(config.trainer.tracker)
    if config.hf_upload is not None and processes.is_first:
        check_upload(config.hf_upload)
    log.info(f"run {run.id} (to start afresh, set another --trainer.id or delete {_checkpoints(run)})")
    with _told(config):
        start_file_log(fill_run_id(config.trainer.log_dir, run.id), run.id, processes)

    with StopRequest() as stop:
        plans = plan_caches(config.data, validation=config.trainer.steps_per_eval is not None)
        build = start_build(config, plans, processes, background=True)
        try:
            _wait_for_data(config, plans, build, stop)
            return _train(run, _end_with_data(config, plans.caches), plans.caches, build, processes, stop, began)
        except StoppedError:
            log.info("stopped before training began; run the same command again to go on")
            return STOPPED_BY_SIGNAL
        finally:
            build.stop()


def _train(
    run: Run,
    config: RunConfig,
    caches: Caches,
    build: Build,
    processes: Processes,
    stop: StopRequest,
    began: float,
) -> int:
    # JAX and what stands on it are imported only now: a mistake so far has cost no seconds
    from lmtrain.checkpoint.checkpointer import Checkpointer, SaveError
    from lmtrain.checkpoint.claim import TakenOverError
    from lmtrain.run.identity import run_identity
    from lmtrain.sharding.mesh import find_devices
    from lmtrain.tracking.goodput import Ledger
    from lmtrain.tracking.timer import Timer
    from lmtrain.train.loop.loop import train
    from lmtrain.train.loop.reporter import DivergedError
    from lmtrain.train.program.program import OutOfMemoryError
    from lmtrain.train.start.exporter import export_folder, is_missing
    from lmtrain.train.start.initial_state import own_checkpoint
    from lmtrain.train.start.resume import check_identity
    from lmtrain.train.start.setup import EVALUATION_PENDING, set_up

    find_devices()
    checkpointer = Checkpointer(_checkpoints(run), config.trainer.checkpointer, processes)
    try:
        if processes.is_first:  # and only now that the run is surely this process's own
            _write_config(run)
        own = own_checkpoint(config, checkpointer, processes)
        tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)
        if processes.is_first and (own is None or own.read_run_info()["identity"]["tokenizer"] == tokenizer.identity):
            with _told(config):
                keep_tokenizer(run, tokenizer)
        if own is not None and own.step >= config.trainer.num_train_steps:
            check_identity(own, run_identity(config, tokenizer.identity, caches.identity))
            pending = EVALUATION_PENDING in own.read_run_info()
            if not pending and not is_missing(export_folder(config, run.id), own.step):
                log.info(f"nothing to do: {own.path} has all {config.trainer.num_train_steps:,} steps")
                return 0
        timer = Timer()
        ledger = Ledger(run_logs(run) if processes.is_first else None, timer, began)
        ledger.write()  # so that a start which dies before its first step is known too
        setup = set_up(config, run.id, tokenizer, caches, checkpointer, own, hf_ref(config), processes, timer, ledger)
        complete = train(setup, config.trainer, stop, lambda: f"cache {build.text}" if build.running else "")
    except (DivergedError, OutOfMemoryError, SaveError, TakenOverError) as error:
        log.error(f"lmtrain: error: {error}")
        return 1
    finally:
        checkpointer.release()
    if not complete:
        log.info(f"stopped after saving to {_checkpoints(run)}; run the same command again to go on")
        return STOPPED_BY_SIGNAL
    log.info(f"done: checkpoints in {_checkpoints(run)}")
    if setup.exporter is not None and setup.exporter.failed:
        steps = ", ".join(map(str, setup.exporter.failed))
        log.error(f"exports of step {steps} failed; `lmtrain export-hf` makes them from the checkpoints")
        return 1
    if build.running:
        log.info("the cache is not complete yet; training again, or `lmtrain preprocess`, goes on from its shards")
    return 0


def _wait_for_data(config: RunConfig, plans: Plans, build: Build, stop: StopRequest) -> None:
    """Until there is enough to begin with: the validation caches, and a batch, or of a mixture a sequence of each."""
    reason = needs_all(config.data, config.epoch)
    if reason is not None:
        if any(not plan.complete for plan in plans.train.values()):
            log.info(f"waiting for the data: {reason}")
        wait(build, stop)
        return

    sequences = 1 if config.data.configs is not None else max(config.trainer.batch_sizes.all)

    def enough() -> bool:
        least = sequences * config.model.seq_len
        begun = all(plan.complete or plan.shards.tokens > least for plan in plans.train.values())
        return begun and all(plan.complete for plan in plans.validation.values())

    wait(build, stop, enough)
    if build.running:
        log.info("training begins while the rest of the data is tokenized")


def _write_config(run: Run) -> None:
    """The resolved config, into the run's folder of logs."""
    folder = run_logs(run)
    with _told(run.config):
        os.makedirs(folder, exist_ok=True)
        remove_temporaries(folder)
        text = show(resolved(run.config), run.loaded.layer)
        write_atomically(os.path.join(folder, "config.yaml"), text.encode())


@contextmanager
def _told(config: RunConfig) -> Iterator[None]:
    """Errors of the file system as ones that name the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"trainer.log_dir: {config.trainer.log_dir} cannot be made: {error.strerror}") from None


def _checkpoints(run: Run) -> str:
    return run.config.trainer.checkpointer.run_folder(run.id)


def _end_with_data(config: RunConfig, caches: Caches) -> RunConfig:
    """The config with as many steps as the data gives, if that is to end the run; schedules follow."""
    trainer = config.trainer
    check_batch(config.data, caches, config.model.seq_len, trainer.batch_sizes)
    steps = plan_steps(
        config.data,
        caches,
        config.model.seq_len,
        trainer.batch_sizes,
        trainer.num_train_steps,
        config.epoch,
        data_seed(config),
    )
    if steps == trainer.num_train_steps:
        return config
    if steps < 1:
        raise UserError("the data is less than one batch; lower trainer.train_batch_size or model.seq_len")
    why = f"epoch {config.epoch}" if config.epoch else "data.stop_strategy first_exhausted"
    log.info(f"{why}: the data ends the run after {steps:,} steps")
    values = config.model_dump()
    values["trainer"]["num_train_steps"] = steps
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{why} makes {steps:,} steps: {error.errors()[0]['msg']}") from None
