"""Checks for something to learn from: documents, and target tokens in the first sequences."""

import dataclasses

import pytest
from data.test_windows import Documents

from lmtrain.data.cache_manifest import ShardInfo
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.data.targets import FirstTargets, check_contents
from lmtrain.data.windows import PackedWindows
from lmtrain.runtime.errors import UserError

CHAT = {"documents": {"format": {"type": "chat"}}}


def shard(documents=1, targets=1, **more):
    return ShardInfo(
        file="f", source={"url": "a.jsonl"}, bytes=1, sha256="", tokens=9, documents=documents, targets=targets, **more
    )


@pytest.mark.parametrize(
    ("shards", "recipe", "message"),
    [
        ([shard(documents=0)], {"documents": {}}, "a.jsonl"),
        ([shard(documents=0, skipped=3)], {"documents": {}}, "3 records"),
        ([shard(targets=0)], CHAT, "1 documents in a.jsonl"),
        ([shard(targets=0)], {"documents": {"format": {"type": "completion"}}}, "data.format.output_field"),
    ],
)
def test_a_cache_without_documents_or_targets_is_refused_with_the_reason(shards, recipe, message):
    with pytest.raises(UserError, match=f"^cache: .*{message}"):
        check_contents("cache", shards, recipe)
    check_contents("cache", [*shards, shard()], recipe)


@pytest.mark.parametrize(
    ("too_long", "message"), [("cut", "are cut off before their targets"), ("drop", "no target token in the first")]
)
def test_targets_are_looked_for_until_the_limit_while_the_cache_grows(too_long, message):
    store = Documents([1, 1], too_long=too_long, complete=False)  # documents of their first token have no target
    windows = PackedWindows(store, 2)
    more = {"shards": store.shards, "too_long": too_long, "packed": {2: windows}}
    cache = Cache(folder="cache", recipe=CHAT, sources=[{"url": "a.jsonl"}], dtype="<u2", **more)
    assert not FirstTargets(DataConfig(), cache, 2).found()
    with pytest.raises(UserError, match=r"a\.jsonl.* first 1 sequences"):
        FirstTargets(DataConfig(), cache, 2, limit=1).found()
    store.add([1, 3])
    first = FirstTargets(DataConfig(), cache, 2, limit=2)
    if too_long == "cut":
        store.add([2])
        assert FirstTargets(DataConfig(), cache, 2).found()
    with pytest.raises(UserError, match=message):
        first.found()
    text = dataclasses.replace(cache, too_long=None)  # all of its tokens are targets
    assert FirstTargets(DataConfig(), text, 2).found()
