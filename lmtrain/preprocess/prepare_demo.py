"""Preparation of a config with `data.demo`: the demo corpus and a tokenizer trained on it."""

import os

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig, demo_tokenizer
from lmtrain.preprocess.demo import TooLittleTextError, file_names, write_demo_corpus
from lmtrain.runtime.logging import log

VOCAB_SIZE = 8192


def missing_demo(config: DataConfig) -> str | None:
    """Folder of the demo if the config uses one and files of it are missing."""
    if config.demo is None:
        return None
    return None if _has_corpus(config.demo) and _has_tokenizer(config) else config.demo


def missing_demo_tokenizer(config: DataConfig) -> bool:
    """Whether the config uses the demo's tokenizer and it is missing."""
    return config.demo is not None and not _has_tokenizer(config)


def prepare_demo(config: DataConfig) -> None:
    """Create the missing files of the demo; does nothing if the config does not use it."""
    if config.demo is None:
        return
    folder = os.path.expanduser(config.demo)
    if not _has_corpus(config.demo):
        try:
            documents, size = write_demo_corpus(folder)
        except TooLittleTextError as error:
            raise UserError(str(error)) from None
        log.info(f"{folder}: created the demo corpus, {documents:,} documents, {size / 1e6:.1f} MB of Python source")
    if not _has_tokenizer(config):
        from lmtrain.preprocess.learn import learn_from_files

        tokenizer = os.path.expanduser(config.tokenizer)
        count = learn_from_files(config.urls("train"), config.text_key, VOCAB_SIZE, tokenizer)
        log.info(f"{tokenizer}: trained a tokenizer of {count:,} tokens on the demo corpus")


def _has_corpus(demo: str) -> bool:
    return all(os.path.isfile(os.path.join(os.path.expanduser(demo), name)) for name in file_names())


def _has_tokenizer(config: DataConfig) -> bool:
    """Whether the tokenizer exists; true for tokenizers other than the demo's."""
    assert config.demo is not None
    made = config.tokenizer == demo_tokenizer(config.demo)
    return not made or os.path.isfile(os.path.join(os.path.expanduser(config.tokenizer), "tokenizer.json"))
