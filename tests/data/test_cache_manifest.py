"""The manifest of a cache, and its shards that are added one by one: readers wait for the tokens they need."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lmtrain.data.cache_manifest import CacheManifest, ShardInfo, Shards, load_manifest, save_manifest
from lmtrain.runtime.errors import UserError

SHARD = ShardInfo(
    file="shard-00000-of-00001.arrayrecord", source={"url": "a"}, bytes=100, sha256="abc", tokens=40, documents=3
)
MANIFEST = CacheManifest(
    split="train", recipe={"tokenizer": {"fingerprint": "f"}}, urls=["a"], dtype="<u2", shards=[SHARD, SHARD]
)


def test_a_manifest_reads_back_as_written(tmp_path):
    save_manifest(str(tmp_path), MANIFEST)
    assert load_manifest(str(tmp_path)) == MANIFEST
    assert (MANIFEST.tokens, MANIFEST.documents) == (80, 6)
    assert load_manifest(str(tmp_path / "none")) is None


@pytest.mark.parametrize("change", [{"format": 99}, {"block_tokens": 5}, None])
def test_another_format_and_a_corrupt_manifest_are_refused(tmp_path, change):
    save_manifest(str(tmp_path), MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change) if change else '{"format": 1,')
    with pytest.raises(UserError, match=r"manifest\.json: "):
        load_manifest(str(tmp_path))


def info(tokens):
    return ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=tokens, documents=1)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def still_waiting(future):
    time.sleep(0.05)
    return not future.done()


def test_shards_of_a_manifest_are_complete():
    shards = Shards.of(
        CacheManifest(split="train", recipe={}, urls=[], dtype="<u2", shards=[info(3), info(0), info(4)])
    )
    assert (shards.tokens, shards.complete, shards.starts.tolist()) == (7, True, [0, 3, 3, 7])
    assert shards.wait_for(10**9) == shards.wait_for(None) == 7
    assert [shard.tokens for shard in shards.follow()] == [3, 0, 4]


def test_waiting_ends_when_there_are_enough_tokens_or_the_cache_is_complete(pool):
    shards = Shards()
    shards.add(info(5))
    assert shards.wait_for(5) == 5
    waiting, many, everything = (pool.submit(shards.wait_for, count) for count in (6, 100, None))
    assert still_waiting(waiting)
    shards.add(info(2))
    assert waiting.result(10) == 7
    assert still_waiting(many)
    assert still_waiting(everything)
    shards.finish()
    assert many.result(10) == everything.result(10) == 7


def test_a_failed_build_is_an_error_for_every_reader_also_of_existing_shards(pool):
    shards = Shards()
    shards.add(info(5))
    waiting, following = pool.submit(shards.wait_for, 6), pool.submit(list, shards.follow())
    assert still_waiting(waiting)
    shards.fail(RuntimeError("broken"))
    for call in (waiting.result, following.result, lambda timeout: shards.wait_for(1)):
        with pytest.raises(RuntimeError, match="broken"):
            call(10)


def test_following_yields_each_shard_once_in_order(pool):
    shards = Shards()
    following = pool.submit(list, shards.follow())
    for tokens in range(20):
        shards.add(info(tokens))
    shards.finish()
    assert [shard.tokens for shard in following.result(10)] == list(range(20))


def test_readers_never_see_starts_without_their_shards():
    shards, wrong, stop = Shards(), [], threading.Event()

    def read():
        while not stop.is_set():
            tokens = shards.tokens
            starts = shards.starts
            count = int(np.searchsorted(starts, tokens - 1, side="right"))
            if tokens and count > len(shards.infos):
                wrong.append(count)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(2000):
        shards.add(info(7))
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
