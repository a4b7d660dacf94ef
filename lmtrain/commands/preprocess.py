"""`lmtrain preprocess CONFIG`: build the token caches of all splits, continuing where a killed build stopped."""

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.data.manifest import Manifest
from lmtrain.preprocess.build import build_cache, split_folder
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.runtime.logging import log, start_console_log


def run(argv: list[str]) -> int:
    run = parse_run(Parser("preprocess", "Tokenize the config's text into a cache of ArrayRecord shards."), argv)
    start_console_log()
    caches = build_caches(run.config.data)
    batch = run.config.trainer.train_batch_size
    for split, manifest in caches.items():
        log.info(
            f"{split_folder(run.config.data, split)}: complete, {manifest.documents:,} documents, "
            f"{manifest.tokens:,} tokens in {len(manifest.shards)} shards"
        )
    steps = caches["train"].tokens // (batch * run.config.model.seq_len)
    log.info(f"one epoch is {steps:,} steps of {batch} sequences of {run.config.model.seq_len} tokens")
    return 0


def build_caches(config: DataConfig) -> dict[str, Manifest]:
    """The finished cache of every split the config has: `train`, and `validation` if given."""
    if not config.urls("train"):
        raise UserError(
            "data.train_urls: no training text; name your files, or set data.demo to a folder to try lmtrain"
        )
    prepare_demo(config)
    splits = [split for split in ("train", "validation") if config.urls(split)]
    return {split: build_cache(config, split) for split in splits}
