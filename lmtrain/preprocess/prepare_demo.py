"""Preparation of a config with `data.demo`: the demo corpus and a tokenizer trained on it."""

import gzip
import hashlib
import json
import os
import sysconfig

from lmtrain.data.config import DataConfig, demo_tokenizer
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

# Built-in demo corpus: the standard library of the running Python, real text that every machine has.
#
# Imports nothing beyond the standard library, so that `tools/demo_corpus.py` runs with any Python.

TRAIN_FILES = 8
MINIMUM_BYTES = 8_000_000
_VALIDATION_SHARE = 20  # one document in this number is for validation
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class TooLittleTextError(ValueError):
    """The standard library is missing, or has no source files."""


def write_demo_corpus(folder: str) -> tuple[int, int]:
    """Write `train.{1..8}-of-8.jsonl.gz` and `validation.jsonl.gz`, one document per `.py` file, key `text`.

    Documents are ordered by path, and a hash of the path selects the file, so that the same Python always gives the
    same bytes. The validation file is written last. Returns the number of documents and their size in bytes.
    """
    library = sysconfig.get_paths()["stdlib"]
    parts: dict[str, list[str]] = {name: [] for name in file_names()}
    size = 0
    for path in _python_files(library):
        text = _read(os.path.join(library, path))
        if text:
            parts[_part_of(path)].append(json.dumps({"text": text, "path": path}, ensure_ascii=False))
            size += len(text.encode())
    if size < MINIMUM_BYTES:
        raise TooLittleTextError(
            f"the standard library at {library} holds {size / 1e6:.1f} MB of Python source, but the demo requires "
            f"{MINIMUM_BYTES / 1e6:.0f} MB; use a full Python installation, or your own text (data.train_urls)"
        )
    os.makedirs(folder, exist_ok=True)
    for name, lines in parts.items():
        path = os.path.join(folder, name)
        with open(path + ".tmp", "wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
            file.writelines(f"{line}\n".encode() for line in lines)
        os.replace(path + ".tmp", path)
    return sum(map(len, parts.values())), size


def file_names() -> list[str]:
    """Names of the files of the corpus in the order of writing."""
    return [f"train.{n}-of-{TRAIN_FILES}.jsonl.gz" for n in range(1, TRAIN_FILES + 1)] + ["validation.jsonl.gz"]


def _python_files(library: str) -> list[str]:
    paths: list[str] = []
    for folder, subfolders, names in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _NOT_THE_LIBRARY]
        paths += [os.path.relpath(os.path.join(folder, name), library) for name in names if name.endswith(".py")]
    return sorted(path.replace(os.sep, "/") for path in paths)


def _read(path: str) -> str:
    """The file's text; empty for the few test files that are deliberately not UTF-8."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        return ""


def _part_of(path: str) -> str:
    number = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
    if number % _VALIDATION_SHARE == 0:
        return "validation.jsonl.gz"
    return f"train.{number // _VALIDATION_SHARE % TRAIN_FILES + 1}-of-{TRAIN_FILES}.jsonl.gz"


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
