"""The tokens that a run can read before its data repeats."""

import pytest
from conftest import TRAIN_FILES, VALIDATION_FILES
from opened_run import open_run

from lmtrain.commands.scaling import train_tokens
from lmtrain.run.config import RunConfig


def test_tokens_are_those_of_the_cache():
    run = open_run()
    (cache,) = run.caches.train.values()
    assert train_tokens(run.config) == cache.shards.tokens > 1000


def test_a_mixture_repeats_when_its_first_source_does():
    sources = {
        name: {"train_urls": [url], "validation_urls": VALIDATION_FILES}
        for name, url in zip("ab", TRAIN_FILES, strict=False)
    }
    mixture = {"train_urls": [], "validation_urls": [], "configs": sources, "train_weights": {"a": 3, "b": 1}}
    run = open_run(data=mixture)
    tokens = {name: cache.shards.tokens for name, cache in run.caches.train.items()}
    assert train_tokens(run.config) == pytest.approx(min(tokens["a"] / 0.75, tokens["b"] / 0.25))


def test_they_are_unknown_without_a_cache(tmp_path):
    data = {"train_urls": TRAIN_FILES, "validation_urls": VALIDATION_FILES, "cache_dir": str(tmp_path / "none")}
    assert train_tokens(RunConfig(data=data | {"tokenizer": "byte"})) is None
    gone = data | {"tokenizer": "byte", "train_urls": [str(tmp_path / "gone.jsonl")]}
    assert train_tokens(RunConfig(data=gone)) is None
