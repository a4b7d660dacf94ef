"""Local copies of the shards of a remote cache: made once, checked, and given up for others."""

import hashlib
import os
import threading
import time

import fsspec
import pytest

from lmtrain.config.errors import UserError
from lmtrain.data import mirror
from lmtrain.data.cache_manifest import ShardInfo
from lmtrain.data.mirror import Mirror, warn_if_small
from lmtrain.data.shards import Shards

SIZE = 1000


def content_of(number):
    return bytes([number]) * SIZE


@pytest.fixture
def cache(tmp_path):
    """The URL of a folder with twelve shards of 1000 bytes, of which `infos` tells."""
    fs = fsspec.filesystem("memory")
    folder = f"{tmp_path}/cache"
    for number in range(12):
        fs.pipe_file(f"{folder}/shard-{number}.arrayrecord", content_of(number))
    yield f"memory://{folder}"
    fs.rm(folder, recursive=True)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "mirror"


@pytest.fixture
def infos():
    return [
        ShardInfo(f"shard-{number}.arrayrecord", {}, SIZE, hashlib.sha256(content_of(number)).hexdigest(), 1, 1)
        for number in range(12)
    ]


def change(cache, number, content):
    """Another content of a shard in the cache; None removes it."""
    fs, path = fsspec.core.url_to_fs(f"{cache}/shard-{number}.arrayrecord")
    if content is None:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, content)


def numbers_in(folder, infos):
    """The shards of which there are copies; fails if there is anything else."""
    by_name = {f"{info.sha256}.arrayrecord": number for number, info in enumerate(infos)}
    return sorted(by_name[name] for name in os.listdir(folder))


def used(folder, info, seconds_ago):
    """Let a copy be one that was last used so long ago."""
    then = time.time() - seconds_ago
    os.utime(folder / f"{info.sha256}.arrayrecord", (then, then))


@pytest.fixture
def downloads(monkeypatch):
    """The files downloaded so far."""
    seen = []

    def download(source, target):
        seen.append(source.rpartition("/")[2])
        real(source, target)

    real = mirror.download
    monkeypatch.setattr(mirror, "download", download)
    return seen


def wait_for_mirror():
    """Until all is fetched ahead that will be."""
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join(10)


def finished(infos):
    shards = Shards()
    for info in infos:
        shards.add(info)
    shards.finish()
    return shards


def test_a_copy_has_the_name_of_its_checksum_and_is_made_once(cache, folder, infos, downloads):
    for mirrored in (Mirror(cache, str(folder), 10**6), Mirror(f"{cache}/", str(folder), 10**6)):
        for _ in range(2):
            path = mirrored.locate(infos[3])
            assert path == str(folder / f"{infos[3].sha256}.arrayrecord")
            with open(path, "rb") as file:
                assert file.read() == content_of(3)
    assert downloads == ["shard-3.arrayrecord"]
    assert numbers_in(folder, infos) == [3]


def test_a_copy_of_another_size_is_made_again(cache, folder, infos):
    mirrored = Mirror(cache, str(folder), 10**6)
    path = mirrored.locate(infos[0])
    with open(path, "wb") as file:
        file.write(content_of(0)[:-1])
    assert mirrored.locate(infos[0]) == path
    with open(path, "rb") as file:
        assert file.read() == content_of(0)


@pytest.mark.parametrize("content", [b"", content_of(5)[:-1], content_of(5) + b"\x05", content_of(6)], ids=len)
def test_a_damaged_shard_is_not_kept_and_the_error_says_what_to_do(cache, folder, infos, content):
    change(cache, 5, content)
    mirrored = Mirror(cache, str(folder), 10**6)
    with pytest.raises(UserError) as caught:
        mirrored.locate(infos[5])
    assert str(caught.value) == (
        f"{cache}/shard-5.arrayrecord: is not what the cache's manifest says: the cache is damaged; delete that shard, "
        f"its .json and {cache}/manifest.json, and run `lmtrain preprocess` again"
    )
    assert os.listdir(folder) == []
    change(cache, 5, content_of(5))
    assert os.path.getsize(mirrored.locate(infos[5])) == SIZE


def test_a_missing_shard_is_named(cache, folder, infos):
    change(cache, 5, None)
    with pytest.raises(UserError, match=f"^{cache}/shard-5.arrayrecord is missing: the cache is damaged"):
        Mirror(cache, str(folder), 10**6).locate(infos[5])
    assert os.listdir(folder) == []


def test_a_full_disk_is_told_as_what_it_is(cache, folder, infos):
    mirrored = Mirror(cache, str(folder), 10**6)
    path = folder / f"{infos[5].sha256}.arrayrecord"
    (folder / f"{path.name}.tmp-{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(UserError, match=rf"^data\.mirror_dir: {path} cannot be written: No space left on device$"):
        mirrored.locate(infos[5])
    assert os.listdir(folder) == []


def test_a_folder_that_cannot_be_made_is_the_users_mistake(cache, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=rf"^data\.mirror_dir: {tmp_path}/file/mirror cannot be made: Not a directory$"):
        Mirror(cache, f"{tmp_path}/file/mirror", 10**6)


def test_a_mirror_in_the_home_folder_is_found(cache, tmp_path, infos, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Mirror(cache, "~/mirror", 10**6).locate(infos[0]).startswith(f"{tmp_path}/home/mirror/")


def test_the_copies_unused_for_longest_go_first(cache, folder, infos):
    before = Mirror(cache, str(folder), 10**6)
    for number, seconds_ago in ((0, 100), (1, 400), (2, 300), (3, 200)):
        before.locate(infos[number])
        used(folder, infos[number], seconds_ago)
    mirrored = Mirror(cache, str(folder), 4 * SIZE)
    mirrored.locate(infos[1])  # the oldest, which is now the newest
    for new, left in ((4, [0, 1, 3, 4]), (5, [0, 1, 4, 5]), (6, [1, 4, 5, 6])):
        mirrored.locate(infos[new])
        assert numbers_in(folder, infos) == left


def test_use_counts_even_if_it_was_before_the_last_copies(cache, folder, infos):
    before = Mirror(cache, str(folder), 10**6)
    for number in range(3):
        before.locate(infos[number])
        used(folder, infos[number], 1000 - number)
    before.locate(infos[0])
    Mirror(cache, str(folder), 3 * SIZE).locate(infos[3])
    assert numbers_in(folder, infos) == [0, 2, 3]


def test_as_many_go_as_room_is_needed_for(cache, folder, infos):
    before = Mirror(cache, str(folder), 10**6)
    for number in range(6):
        before.locate(infos[number])
        used(folder, infos[number], 1000 - number)
    Mirror(cache, str(folder), 3 * SIZE).locate(infos[6])
    assert numbers_in(folder, infos) == [4, 5, 6]


def test_the_copies_just_asked_for_stay_whatever_the_limit(cache, folder, infos):
    mirrored = Mirror(cache, str(folder), 1)
    for info in infos[:8]:
        mirrored.locate(info)
    for _ in range(8):
        mirrored.locate(infos[0])  # the others stay, and it is not the one to go next
    mirrored.locate(infos[8])
    assert numbers_in(folder, infos) == [0, 2, 3, 4, 5, 6, 7, 8]


def test_a_reader_keeps_a_copy_that_goes(cache, folder, infos):
    mirrored = Mirror(cache, str(folder), 1)
    with open(mirrored.locate(infos[0]), "rb") as reader:
        for info in infos[1:]:
            mirrored.locate(info)
        assert 0 not in numbers_in(folder, infos)
        assert reader.read() == content_of(0)


def test_other_files_in_the_folder_are_left_alone(cache, folder, infos):
    mirrored = Mirror(cache, str(folder), 1)
    (folder / "notes.txt").write_bytes(b"mine" * SIZE)
    for info in infos:
        mirrored.locate(info)
    assert (folder / "notes.txt").exists()


def test_many_threads_that_ask_for_a_shard_share_one_download(cache, folder, infos, monkeypatch):
    real, downloads = mirror.download, []

    def download(source, target):
        downloads.append(source)
        time.sleep(0.05)
        real(source, target)

    monkeypatch.setattr(mirror, "download", download)
    mirrored = Mirror(cache, str(folder), 10**6)
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(mirrored.locate(infos[0]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 1
    assert paths == [str(folder / f"{infos[0].sha256}.arrayrecord")] * 8


def test_a_shard_does_not_wait_for_the_download_of_another(cache, folder, infos, monkeypatch):
    real, began, go_on = mirror.download, threading.Event(), threading.Event()

    def download(source, target):
        if "shard-0" in source:
            began.set()
            assert go_on.wait(10)
        real(source, target)

    monkeypatch.setattr(mirror, "download", download)
    mirrored = Mirror(cache, str(folder), 10**6)
    slow = threading.Thread(target=mirrored.locate, args=(infos[0],))
    slow.start()
    assert began.wait(10)
    mirrored.locate(infos[1])
    assert numbers_in_copies(folder, infos) == [1]
    go_on.set()
    slow.join()
    assert numbers_in(folder, infos) == [0, 1]


def numbers_in_copies(folder, infos):
    """Without the copies under way."""
    return [number for number, info in enumerate(infos) if (folder / f"{info.sha256}.arrayrecord").exists()]


def test_shards_are_fetched_ahead_in_order_as_far_as_there_is_room(cache, folder, infos, downloads):
    Mirror(cache, str(folder), 4 * SIZE).fetch_ahead(finished(infos))
    wait_for_mirror()
    assert downloads == [f"shard-{number}.arrayrecord" for number in range(4)]
    assert numbers_in(folder, infos) == [0, 1, 2, 3]


def test_what_is_fetched_ahead_follows_a_cache_that_grows(cache, folder, infos):
    shards = Shards()
    Mirror(cache, str(folder), 10**6).fetch_ahead(shards)
    for info in infos[:2]:
        shards.add(info)
    deadline = time.monotonic() + 10
    while numbers_in_copies(folder, infos) != [0, 1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert numbers_in_copies(folder, infos) == [0, 1]
    shards.add(infos[2])
    shards.finish()
    wait_for_mirror()
    assert numbers_in(folder, infos) == [0, 1, 2]


def test_a_shard_that_cannot_be_fetched_ahead_is_an_error_only_for_its_reader(cache, folder, infos):
    change(cache, 1, content_of(2))
    mirrored = Mirror(cache, str(folder), 10**6)
    mirrored.fetch_ahead(finished(infos))
    wait_for_mirror()
    assert numbers_in(folder, infos) == [0]
    mirrored.locate(infos[2])
    with pytest.raises(UserError, match="damaged"):
        mirrored.locate(infos[1])


def test_a_mirror_too_small_for_a_full_shuffle_is_told(caplog, infos):
    warn_if_small("gs://b/cache", finished(infos), 12 * SIZE)
    assert caplog.records == []
    warn_if_small("gs://b/cache", finished(infos), 12 * SIZE - 1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("gs://b/cache: 0.0 GB of shards do not fit data.max_mirror_bytes (0.0 GB)")


def test_processes_that_share_a_folder_may_make_room_at_once(cache, folder, infos, monkeypatch):
    before = Mirror(cache, str(folder), 10**6)
    for info in infos[:3]:
        before.locate(info)
    remove = os.remove

    def remove_after_another(path):
        remove(path)
        monkeypatch.undo()
        remove(path)

    monkeypatch.setattr(mirror.os, "remove", remove_after_another)
    Mirror(cache, str(folder), 3 * SIZE).locate(infos[3])
    assert 3 in numbers_in(folder, infos)
