"""Making what a config with `data.demo` stands on: the demo corpus and the tokenizer learned from it."""

import os

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig, demo_tokenizer
from lmtrain.preprocess.demo import TooLittleTextError, file_names, write_demo_corpus
from lmtrain.runtime.logging import log

VOCAB_SIZE = 8192


def missing_demo(config: DataConfig) -> str | None:
    """The folder of the demo if the config uses one that is not all there."""
    if config.demo is None:
        return None
    return None if _corpus_is_there(config.demo) and _tokenizer_is_there(config) else config.demo


def missing_demo_tokenizer(config: DataConfig) -> bool:
    """Whether the config's tokenizer is that of a demo, and not made yet."""
    return config.demo is not None and not _tokenizer_is_there(config)


def prepare_demo(config: DataConfig) -> None:
    """Make whatever is missing of the demo; nothing if the config does not use it."""
    if config.demo is None:
        return
    folder = os.path.expanduser(config.demo)
    if not _corpus_is_there(config.demo):
        try:
            documents, size = write_demo_corpus(folder)
        except TooLittleTextError as error:
            raise UserError(str(error)) from None
        log.info(f"{folder}: made the demo corpus, {documents:,} documents, {size / 1e6:.1f} MB of Python source")
    if not _tokenizer_is_there(config):
        from lmtrain.preprocess.learn import learn_from_files

        tokenizer = os.path.expanduser(config.tokenizer)
        count = learn_from_files(config.urls("train"), config.text_key, VOCAB_SIZE, tokenizer)
        log.info(f"{tokenizer}: learned a tokenizer of {count:,} entries from it")


def _corpus_is_there(demo: str) -> bool:
    return all(os.path.isfile(os.path.join(os.path.expanduser(demo), name)) for name in file_names())


def _tokenizer_is_there(config: DataConfig) -> bool:
    """Also true of a tokenizer that is not the demo's to make."""
    assert config.demo is not None
    made = config.tokenizer == demo_tokenizer(config.demo)
    return not made or os.path.isfile(os.path.join(os.path.expanduser(config.tokenizer), "tokenizer.json"))
