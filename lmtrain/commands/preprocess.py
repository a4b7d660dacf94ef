"""`lmtrain preprocess CONFIG`: build the token caches of all splits, continuing where a killed build stopped."""

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.data.manifest import Manifest, load_manifest
from lmtrain.preprocess.build import build_cache, split_folder
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.sources import has_text
from lmtrain.runtime.logging import log, start_console_log


def run(argv: list[str]) -> int:
    description = "Tokenize the config's text into a cache of ArrayRecord shards."
    run = parse_run(Parser("preprocess", description, lists_settings=True), argv)
    run.refuse_planned()
    start_console_log()
    caches = build_caches(run.config.data)
    batch = run.config.trainer.train_batch_size
    for folder, manifest in caches.values():
        log.info(
            f"{folder}: complete, {manifest.documents:,} documents, "
            f"{manifest.tokens:,} tokens in {len(manifest.shards)} shards"
        )
    steps = caches["train"][1].tokens // (batch * run.config.model.seq_len)
    log.info(f"one epoch is {steps:,} steps of {batch} sequences of {run.config.model.seq_len} tokens")
    return 0


def build_caches(config: DataConfig) -> dict[str, tuple[str, Manifest]]:
    """Folder and manifest of the finished cache of every split the config has: `train`, and `validation` if given."""
    require_text(config, "train")
    # looking into a data set takes seconds, and is needed only once
    validates = load_manifest(split_folder(config, "validation")) is not None or has_text(config, "validation")
    splits = ["train", *(["validation"] if validates else [])]
    return {split: build_cache_of(config, split) for split in splits}


def build_cache_of(config: DataConfig, split: str) -> tuple[str, Manifest]:
    """Folder and manifest of the finished cache of one split. Raises `UserError` if the config has no text for it."""
    require_text(config, split)
    prepare_demo(config)
    return split_folder(config, split), build_cache(config, split)


def require_text(config: DataConfig, split: str) -> None:
    """Raise `UserError` if a config, which may be without data, has no text for `split`."""
    if config.id is None and not config.urls(split):
        raise UserError(
            f"data.{split}_urls: no text for {'training' if split == 'train' else 'validation'}; name your files, "
            "or set data.demo to a folder to try lmtrain"
        )
