"""`lmtrain train CONFIG`: train, or go on where the last run of the same config stopped."""

from lmtrain.commands.arguments import Parser, Run, parse_run
from lmtrain.commands.preprocess import build_caches
from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.build import split_folder
from lmtrain.runtime.logging import log, start_console_log, start_file_log
from lmtrain.runtime.run_path import fill_run_id, run_path
from lmtrain.runtime.signals import STOPPED_BY_SIGNAL, StopRequest


def run(argv: list[str]) -> int:
    run = parse_run(Parser("train", "Train a model, or go on where the last run of the same config stopped."), argv)
    start_console_log()
    config = run.config
    log.info(f"run {run.id} (to start afresh, set another --trainer.id or delete {_checkpoints(run)})")
    try:
        start_file_log(fill_run_id(config.trainer.log_dir, run.id), run.id)
    except OSError as error:
        raise UserError(f"trainer.log_dir: {config.trainer.log_dir} cannot be made: {error.strerror}") from None

    manifests = build_caches(config.data)

    # JAX and what stands on it are imported only now: a mistake so far has cost no seconds
    from lmtrain.train.loop import DivergedError, train
    from lmtrain.train.setup import Caches, finished_checkpoint, set_up

    finished = finished_checkpoint(config, run.id)
    if finished is not None:
        log.info(f"nothing to do: {finished.path} has all {config.trainer.num_train_steps:,} steps")
        return 0
    caches = {split: (split_folder(config.data, split), manifest) for split, manifest in manifests.items()}
    tokenizer = load_tokenizer(config.data.tokenizer)
    with StopRequest() as stop:
        setup = set_up(
            config, run.id, tokenizer.vocab_size, tokenizer.identity, Caches(caches["train"], caches.get("validation"))
        )
        try:
            complete = train(setup, config.trainer, stop)
        except DivergedError as error:
            log.error(f"lmtrain: error: {error}")
            return 1
    if not complete:
        log.info(f"stopped after saving to {_checkpoints(run)}; run the same command again to go on")
        return STOPPED_BY_SIGNAL
    log.info(f"done: checkpoints in {_checkpoints(run)}")
    return 0


def _checkpoints(run: Run) -> str:
    return run_path(run.config.trainer.checkpointer.base_path, run.id)
