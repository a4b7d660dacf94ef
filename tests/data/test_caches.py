"""The caches of a run: their identity and number of steps, and local copies of the shards of a remote one."""

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from lmtrain.data import caches
from lmtrain.data.cache_manifest import ShardInfo, Shards
from lmtrain.data.caches import (
    Cache,
    Caches,
    Mirror,
    build_mixture,
    check_batch,
    choose_steps,
    describe_epochs,
    needs_all,
    warn_if_small,
)
from lmtrain.data.config import BatchSizes, DataConfig
from lmtrain.runtime.errors import UserError

TWO = {"a": {"train_urls": ["a"]}, "b": {"train_urls": ["b"]}}


def cache_of(*tokens, url="a.jsonl", fingerprint="f", recipe=None):
    shards = Shards()
    for count in tokens:
        shards.add(shard(0, count))
    source = {"url": url, "bytes": 9, "fingerprint": fingerprint, "start": None}
    return Cache(folder="folder", recipe=recipe or {"tokenizer": "t"}, sources=[source], dtype="<u2", shards=shards)


def finished_cache(*tokens):
    found = cache_of(*tokens)
    found.shards.finish()
    return found


def test_identity_is_known_before_the_build_and_ignores_the_location_of_the_text():
    empty, whole = Caches({"": cache_of()}, {}), Caches({"": cache_of(100, 200)}, {})
    assert empty.identity == whole.identity == Caches({"": cache_of(url="gs://moved/a.jsonl")}, {}).identity
    for other in (cache_of(fingerprint="g"), cache_of(recipe={"tokenizer": "u"})):
        assert Caches({"": other}, {}).identity != empty.identity
    assert Caches({"a": cache_of(), "b": cache_of()}, {}).identity != Caches({"a": cache_of()}, {}).identity


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
    caches = Caches({"": cache_of(1000, 640)}, {})  # 102 windows of 16, 25 batches of 4
    plan = lambda epoch, steps=500: choose_steps(DataConfig(), caches, 16, BatchSizes.of(4), steps, epoch, 0)  # noqa: E731
    assert (plan(1), plan(2), plan(2, 30), plan(0)) == (25, 51, 30, 500)


def test_a_weight_for_a_source_without_training_text_is_a_user_error():
    config = DataConfig(configs=TWO, train_weights={"a": 1.0, "b": 0.5})
    with pytest.raises(UserError, match=r"data\.train_weights: 'b'"):
        build_mixture(config, ["a"], BatchSizes.of(4), 0)
    assert build_mixture(DataConfig(), [""], BatchSizes.of(4), 0) is None


@pytest.mark.parametrize(
    "weights", [{"a": 0.75, "b": 0.25, "c": 0}, [[0, {"a": 3, "b": 1, "c": 0}], [100, {"a": 1, "b": 3, "c": 1}]]]
)
def test_epoch_length_follows_from_the_first_weight_of_the_source(weights):
    caches = {"a": finished_cache(1000, 5400), "b": finished_cache(1000, 5400), "c": cache_of(1000, 5400)}
    config = DataConfig(configs=TWO | {"c": {"train_urls": ["c"]}}, train_weights=weights)
    first, second, _ = describe_epochs(config, caches, 16, BatchSizes.of(4))
    assert ("75 %" in first, "133 steps" in first, "25 %" in second, "400 steps" in second) == (True,) * 4
    (alone,) = describe_epochs(DataConfig(), {"": caches["c"]}, 16, BatchSizes.of(4))
    assert "100 steps" in alone


def test_a_batch_larger_than_the_data_is_refused_with_both_numbers():
    caches = Caches({"": finished_cache(300, 340)}, {})  # 40 sequences of 16
    check_batch(DataConfig(), caches, 16, BatchSizes.of(40))
    with pytest.raises(UserError, match=r"train_batch_size: 64 .* 40 "):
        check_batch(DataConfig(), caches, 16, BatchSizes.of(64))
    check_batch(DataConfig(), Caches({"": cache_of(300, 340)}, {}), 16, BatchSizes.of(64))


SIZE = 1000


def content_of(number):
    return bytes([number]) * SIZE


@pytest.fixture
def cache(tmp_path):
    """URL of a folder with the twelve shards of 1000 bytes that `INFOS` describes."""
    fs = fsspec.filesystem("memory")
    folder = f"{tmp_path}/cache"
    for number in range(12):
        fs.pipe_file(f"{folder}/shard-{number}.arrayrecord", content_of(number))
    yield f"memory://{folder}"
    fs.rm(folder, recursive=True)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "mirror"


def shard(number, tokens=1):
    checksum = hashlib.sha256(content_of(number)).hexdigest()
    name = f"shard-{number}.arrayrecord"
    return ShardInfo(file=name, source={}, bytes=SIZE, sha256=checksum, tokens=tokens, documents=1)


INFOS = list(map(shard, range(12)))


def change(cache, number, content):
    """Replace the content of a shard in the cache; None deletes the shard."""
    fs, path = fsspec.core.url_to_fs(f"{cache}/shard-{number}.arrayrecord")
    if content is None:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, content)


def numbers_in(folder):
    """Numbers of the shards with a copy; fails if the folder has any other file."""
    by_name = {f"{info.sha256}.arrayrecord": number for number, info in enumerate(INFOS)}
    return sorted(by_name[name] for name in os.listdir(folder))


def numbers_in_copies(folder):
    """Numbers of the complete copies, without unfinished downloads and other files."""
    return [number for number, info in enumerate(INFOS) if (folder / f"{info.sha256}.arrayrecord").exists()]


@pytest.fixture
def downloads(monkeypatch):
    """Names of the files downloaded so far, which takes some time."""
    seen, real = [], caches.download

    def download(source, target):
        seen.append(source.rpartition("/")[2])
        time.sleep(0.05)
        real(source, target)

    monkeypatch.setattr(caches, "download", download)
    return seen


def wait_for_mirror():
    """Wait until the prefetch has ended."""
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join(10)


def finished():
    shards = Shards()
    for info in INFOS:
        shards.add(info)
    shards.finish()
    return shards


def test_a_copy_is_named_by_its_checksum_and_downloaded_once(cache, folder, downloads):
    for mirrored in (Mirror(cache, str(folder), 10**6), Mirror(f"{cache}/", str(folder), 10**6)):
        for _ in range(2):
            path = mirrored.locate(INFOS[3])
            assert path == str(folder / f"{INFOS[3].sha256}.arrayrecord")
            assert content(path) == content_of(3)
    assert downloads == ["shard-3.arrayrecord"]
    assert numbers_in(folder) == [3]


def content(path):
    with open(path, "rb") as file:
        return file.read()


def test_a_copy_with_a_wrong_size_is_downloaded_again(cache, folder):
    mirrored = Mirror(cache, str(folder), 10**6)
    path = mirrored.locate(INFOS[0])
    os.truncate(path, SIZE - 1)
    assert content(mirrored.locate(INFOS[0])) == content_of(0)


@pytest.mark.parametrize("damaged", [b"", content_of(5)[:-1], content_of(5) + b"\x05", content_of(6)], ids=len)
def test_a_corrupt_or_missing_shard_is_not_kept_and_named(cache, folder, damaged):
    change(cache, 5, damaged)
    mirrored = Mirror(cache, str(folder), 10**6)
    with pytest.raises(UserError, match=f"^{cache}/shard-5.arrayrecord: checksum.*{cache}/manifest.json"):
        mirrored.locate(INFOS[5])
    change(cache, 5, None)
    with pytest.raises(UserError, match=f"^{cache}/shard-5.arrayrecord is missing"):
        mirrored.locate(INFOS[5])
    assert os.listdir(folder) == []
    change(cache, 5, content_of(5))
    assert os.path.getsize(mirrored.locate(INFOS[5])) == SIZE


def test_a_shard_that_the_network_garbles_is_downloaded_again(cache, folder, monkeypatch):
    garbled, download = iter((b"1", b"2")), caches.download

    def garble(url, local):
        download(url, local)
        if (change := next(garbled, None)) is not None:
            with open(local, "wb") as file:
                file.write(content_of(0)[:-1] + change)

    monkeypatch.setattr(caches, "download", garble)
    assert content(Mirror(cache, str(folder), 10**9).locate(INFOS[0])) == content_of(0)
    assert next(garbled, None) is None


def test_a_full_disk_is_reported(cache, folder):
    mirrored = Mirror(cache, str(folder), 10**6)
    path = folder / f"{INFOS[5].sha256}.arrayrecord"
    (folder / f"{path.name}.tmp-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"^data\.mirror_dir: {path} "):
        mirrored.locate(INFOS[5])
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_created_is_a_user_error_and_one_at_home_is_found(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Mirror(cache, "~/mirror", 10**6).locate(INFOS[0]).startswith(f"{tmp_path}/home/mirror/")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=rf"^data\.mirror_dir: {tmp_path}/file/mirror"):
        Mirror(cache, f"{tmp_path}/file/mirror", 10**6)


def copied(cache, folder, count):
    """Copy the first shards; the first one was used the longest ago."""
    mirrored = Mirror(cache, str(folder), 10**6)
    for number in range(count):
        path = mirrored.locate(INFOS[number])
        os.utime(path, (time.time() - 1000 + number,) * 2)


def test_least_recently_used_copies_are_evicted_first(cache, folder):
    copied(cache, folder, 4)
    mirrored = Mirror(cache, str(folder), 4 * SIZE)
    mirrored.locate(INFOS[0])  # the least recently used copy is now the most recent one
    for new, left in ((4, [0, 2, 3, 4]), (5, [0, 3, 4, 5]), (6, [0, 4, 5, 6])):
        mirrored.locate(INFOS[new])
        assert numbers_in(folder) == left


def test_recently_requested_copies_are_kept_whatever_the_limit(cache, folder):
    mirrored = Mirror(cache, str(folder), 1)
    for info in INFOS[:8]:
        mirrored.locate(info)
    for _ in range(8):
        mirrored.locate(INFOS[0])  # evicts no other copy, and makes this the most recent one
    mirrored.locate(INFOS[8])
    assert numbers_in(folder) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_an_open_reader_can_read_an_evicted_copy_and_other_files_are_left_alone(cache, folder):
    mirrored = Mirror(cache, str(folder), 1)
    (folder / "notes.txt").write_bytes(b"mine" * SIZE)
    with open(mirrored.locate(INFOS[0]), "rb") as reader:
        for info in INFOS[1:]:
            mirrored.locate(info)
        assert 0 not in numbers_in_copies(folder)
        assert reader.read() == content_of(0)
    assert (folder / "notes.txt").exists()


def test_threads_that_request_the_same_shard_share_one_download(cache, folder, downloads):
    mirrored = Mirror(cache, str(folder), 10**6)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(mirrored.locate, INFOS[:1] * 8))
    assert len(downloads) == 1
    assert paths == [str(folder / f"{INFOS[0].sha256}.arrayrecord")] * 8


def test_shards_are_prefetched_in_order_up_to_the_limit(cache, folder, downloads):
    Mirror(cache, str(folder), 4 * SIZE).fetch_ahead(finished())
    wait_for_mirror()
    assert downloads == [f"shard-{number}.arrayrecord" for number in range(4)]
    assert numbers_in(folder) == [0, 1, 2, 3]


def test_a_failed_prefetch_is_an_error_only_for_the_reader_of_the_shard(cache, folder):
    change(cache, 1, content_of(2))
    mirrored = Mirror(cache, str(folder), 10**6)
    mirrored.fetch_ahead(finished())
    wait_for_mirror()
    assert numbers_in(folder) == [0]
    mirrored.locate(INFOS[2])
    with pytest.raises(UserError, match="checksum mismatch"):
        mirrored.locate(INFOS[1])


def test_a_mirror_too_small_for_a_full_shuffle_logs_a_warning(caplog):
    warn_if_small("gs://b/cache", finished(), 12 * SIZE)
    assert caplog.records == []
    warn_if_small("gs://b/cache", finished(), 12 * SIZE - 1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "data.max_mirror_bytes" in record.getMessage()


def test_processes_that_share_a_folder_may_evict_at_the_same_time(cache, folder, monkeypatch):
    copied(cache, folder, 3)
    remove = os.remove

    def remove_after_another(path):
        remove(path)
        monkeypatch.undo()
        remove(path)

    monkeypatch.setattr(caches.os, "remove", remove_after_another)
    Mirror(cache, str(folder), 3 * SIZE).locate(INFOS[3])
    assert 3 in numbers_in(folder)
