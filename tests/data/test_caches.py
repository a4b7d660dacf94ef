"""The caches of a run: their identity, their number of steps, and when their order is known."""

import pytest

from lmtrain.data.cache_manifest import ShardInfo, Shards
from lmtrain.data.caches import Cache, Caches, build_mixture, check_batch, choose_steps, describe_epochs, needs_all
from lmtrain.data.config import BatchSizes, DataConfig
from lmtrain.runtime.errors import UserError

TWO = {"a": {"train_urls": ["a"]}, "b": {"train_urls": ["b"]}}


def cache(*tokens, url="a.jsonl", fingerprint="f", recipe=None):
    shards = Shards()
    for count in tokens:
        shards.add(ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=count, documents=1))
    source = {"url": url, "bytes": 9, "fingerprint": fingerprint, "start": None}
    return Cache(folder="folder", recipe=recipe or {"tokenizer": "t"}, sources=[source], dtype="<u2", shards=shards)


def finished(*tokens):
    found = cache(*tokens)
    found.shards.finish()
    return found


def test_identity_is_known_before_the_build_and_ignores_the_location_of_the_text():
    empty, whole = Caches({"": cache()}, {}), Caches({"": cache(100, 200)}, {})
    assert empty.identity == whole.identity == Caches({"": cache(url="gs://moved/a.jsonl")}, {}).identity
    for other in (cache(fingerprint="g"), cache(recipe={"tokenizer": "u"})):
        assert Caches({"": other}, {}).identity != empty.identity
    assert Caches({"a": cache(), "b": cache()}, {}).identity != Caches({"a": cache()}, {}).identity


@pytest.mark.parametrize(
    ("settings", "epoch", "reason"),
    [
        ({}, 0, None),
        ({"shuffle": 100}, 0, None),
        ({"shuffle": True}, 0, "data.shuffle true"),
        ({}, 2, "epoch "),
        ({"configs": TWO}, 0, None),
        ({"configs": TWO, "stop_strategy": "first_exhausted"}, 0, "data.stop_strategy first_exhausted"),
        ({"stop_strategy": "first_exhausted"}, 0, None),  # no mixture
    ],
)
def test_settings_that_require_the_complete_cache_give_the_reason(settings, epoch, reason):
    found = needs_all(DataConfig(**settings), epoch)
    assert found is None if reason is None else found.startswith(reason)


def test_epochs_end_the_run_also_with_a_growing_cache():
    caches = Caches({"": cache(1000, 640)}, {})  # 102 windows of 16, 25 batches of 4
    plan = lambda epoch, steps=500: choose_steps(DataConfig(), caches, 16, BatchSizes.of(4), steps, epoch, 0)  # noqa: E731
    assert (plan(1), plan(2), plan(2, 30), plan(0)) == (25, 51, 30, 500)


def test_a_weight_for_a_source_without_training_text_is_a_user_error():
    config = DataConfig(configs=TWO, train_weights={"a": 1.0, "b": 0.5})
    with pytest.raises(UserError, match=r"data\.train_weights: 'b' has a weight, but no training text"):
        build_mixture(config, ["a"], BatchSizes.of(4), 0)
    assert build_mixture(DataConfig(), [""], BatchSizes.of(4), 0) is None


@pytest.mark.parametrize(
    "weights", [{"a": 0.75, "b": 0.25, "c": 0}, [[0, {"a": 3, "b": 1, "c": 0}], [100, {"a": 1, "b": 3, "c": 1}]]]
)
def test_epoch_length_follows_from_the_first_weight_of_the_source(weights):
    caches = {"a": finished(1000, 5400), "b": finished(1000, 5400), "c": cache(1000, 5400)}
    config = DataConfig(configs=TWO | {"c": {"train_urls": ["c"]}}, train_weights=weights)
    assert describe_epochs(config, caches, 16, BatchSizes.of(4)) == [
        "one epoch of a (75 % of the examples) is 133 steps",
        "one epoch of b (25 % of the examples) is 400 steps",
        "c has weight 0 at the first step",
    ]
    alone = describe_epochs(DataConfig(), {"": caches["c"]}, 16, BatchSizes.of(4))
    assert alone == ["one epoch is not known yet, 100 steps so far"]


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers():
    caches = Caches({"": finished(300, 340)}, {})  # 40 sequences of 16
    check_batch(DataConfig(), caches, 16, BatchSizes.of(40))
    with pytest.raises(UserError, match=r"train_batch_size: 64 sequences of 16 tokens, but .* has 40 \(640 tokens\)"):
        check_batch(DataConfig(), caches, 16, BatchSizes.of(64))
    check_batch(DataConfig(), Caches({"": cache(300, 340)}, {}), 16, BatchSizes.of(64))
