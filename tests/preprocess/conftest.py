"""A small cache of three files, which tests change or finish."""

import json
import shutil

import pytest
from cache_building import build_cache

from lmtrain.data.config import DataConfig
from lmtrain.hf.extend_tokenizer import learn_bpe
from lmtrain.hf.tokenizer import save_tokenizer

NAMES = ["a.jsonl", "b.jsonl", "c.jsonl"]


def lines(*texts):
    return "".join(json.dumps({"text": text, "body": text}) + "\n" for text in texts)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def mtimes(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def config(**changes):
    return DataConfig(**{"train_urls": NAMES, "tokenizer": "tok", "num_preprocess_workers": 1, **changes})


@pytest.fixture(scope="package")
def original(tmp_path_factory):
    """Sources and a tokenizer; never modified, tests get copies."""
    root = tmp_path_factory.mktemp("original")
    for name, repeat in zip(NAMES, (300, 3, 40), strict=True):
        (root / name).write_text(lines(*(f"{name} has the line {i}" for i in range(repeat))))
    save_tokenizer(learn_bpe(["the line has"], 270), str(root / "tok"), eos="<|endoftext|>", bos="<|endoftext|>")
    return root


@pytest.fixture(scope="package")
def finished(original, tmp_path_factory):
    """The cache of an uninterrupted build by one worker."""
    copy = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(original)
        build_cache(config(cache_dir=str(copy)), "train")
    return copy / "train"


@pytest.fixture
def work(original, tmp_path, monkeypatch):
    """A copy of `original` as the working folder, so that the relative paths of the config refer to the copy."""
    folder = tmp_path / "work"
    shutil.copytree(original, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cache(work, finished):
    """A copy of the finished cache at the place of the config."""
    shutil.copytree(finished, work / "cache" / "train")
    return work / "cache" / "train"
