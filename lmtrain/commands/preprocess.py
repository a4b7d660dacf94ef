"""`lmtrain preprocess CONFIG`: build the token caches of all splits, continuing where a killed build stopped."""

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.config.errors import UserError
from lmtrain.data.caches import Cache, Caches
from lmtrain.data.config import DataConfig
from lmtrain.data.manifest import load_manifest
from lmtrain.preprocess.build import build_cache, split_folder
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.sources import has_text
from lmtrain.runtime.logging import log, start_console_log


def run(argv: list[str]) -> int:
    description = "Tokenize the config's text into a cache of ArrayRecord shards."
    run = parse_run(Parser("preprocess", description, lists_settings=True), argv)
    run.refuse_planned()
    start_console_log()
    config = run.config
    caches = build_caches(config.data)
    batch, seq_len = config.trainer.train_batch_size, config.model.seq_len
    for cache in [*caches.train.values(), *caches.validation.values()]:
        log.info(
            f"{cache.folder}: complete, {cache.manifest.documents:,} documents, "
            f"{cache.manifest.tokens:,} tokens in {len(cache.manifest.shards)} shards"
        )
    for name, cache in caches.train.items():
        steps = cache.manifest.tokens // (batch * seq_len)
        log.info(
            f"one epoch{f' of {name}' if name else ''} is {steps:,} steps of {batch} sequences of {seq_len} tokens"
        )
    return 0


def build_caches(config: DataConfig) -> Caches:
    """The finished caches of every split of every source the config has, `validation` only where there is text."""
    require_text(config, "train")
    return Caches(train=_build_split(config, "train"), validation=_build_split(config, "validation"))


def build_validation(config: DataConfig) -> dict[str, Cache]:
    """The finished validation caches. Raises `UserError` if the config has no validation text."""
    caches = _build_split(config, "validation")
    if not caches:
        require_text(config, "validation")
        raise UserError("data: there is no validation text in it")
    return caches


def require_text(config: DataConfig, split: str) -> None:
    """Raise `UserError` if a config, which may be without data, has no text for `split`."""
    if not any(source.id is not None or source.urls(split) for source in config.sources().values()):
        raise UserError(
            f"data.{split}_urls: no text for {'training' if split == 'train' else 'validation'}; name your files, "
            "or set data.demo to a folder to try lmtrain"
        )


def _build_split(config: DataConfig, split: str) -> dict[str, Cache]:
    caches = {}
    for name, source in config.sources().items():
        folder = split_folder(source, split)
        # looking into a data set takes seconds, and is needed only once
        if load_manifest(folder) is not None or has_text(source, split):
            prepare_demo(source)
            caches[name] = Cache(folder, build_cache(source, split))
    return caches
