"""Checksums of shards: corruption is found before the data is read, and each shard is verified once on a machine."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
from cache_building import build_cache, open_built
from conftest import TOKENIZER, TRAIN_FILES

from lmtrain.data import verification
from lmtrain.data.cache_manifest import Shards
from lmtrain.data.config import DataConfig
from lmtrain.data.verification import verify, verify_in_background
from lmtrain.runtime.errors import UserError


@pytest.fixture
def built(tmp_path, monkeypatch):
    """The config of a cache, its manifest, and its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))
    config = DataConfig(train_urls=TRAIN_FILES, tokenizer=str(TOKENIZER), cache_dir=str(tmp_path / "cache"))
    return config, build_cache(config, "train"), tmp_path / "cache" / "train"


def flip(path):
    """Change a bit in the middle; size and modification time stay."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_corrupt_shard_that_is_not_read_yet_is_an_error_whose_advice_rebuilds_it(built):
    config, manifest, folder = built
    last = folder / manifest.shards[-1].file
    good = last.read_bytes()
    flip(last)
    store = open_built(config)
    shards = store.shards
    store.read(np.array([0]), 8)  # from the first shard
    verify_in_background(str(folder), shards).join()
    with pytest.raises(UserError, match="checksum") as caught:
        store.read(np.array([0]), 8)
    pattern, _, other = str(caught.value).partition("; delete ")[2].partition(" and run ")[0].partition(" and ")
    for path in [*last.parent.glob(os.path.basename(pattern)), *last.parent.glob(os.path.basename(other))]:
        path.unlink()
    again = build_cache(config, "train")
    assert again == manifest
    assert last.read_bytes() == good
    shards = Shards.of(again)
    verify(str(folder), shards)
    shards.check()


def test_shards_are_verified_once_on_a_machine_and_again_if_they_change(built, monkeypatch):
    _, manifest, folder = built
    hashed = []
    original = verification.file_sha256
    monkeypatch.setattr(verification, "file_sha256", lambda path: hashed.append(path) or original(path))
    for count in (3, 3):
        verify(str(folder), Shards.of(manifest))
        assert len(hashed) == count
    os.utime(folder / manifest.shards[0].file)
    verify(str(folder), Shards.of(manifest))
    assert len(hashed) == 4
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    (folder.parent.parent / "user cache").write_text("not a folder")  # nothing can be recorded
    verify(str(folder), Shards.of(manifest))
    assert len(hashed) == 7


def test_shards_that_are_added_later_are_verified_and_a_failed_build_ends_the_verification(built):
    _, manifest, folder = built
    shards, failed = Shards(), Shards()
    threads = [verify_in_background(str(folder), each) for each in (shards, failed)]
    shards.add(manifest.shards[0])
    shards.add(dataclasses.replace(manifest.shards[1], sha256="0" * 64))
    failed.fail(UserError("no tokens"))
    for thread, each, named in zip(threads, (shards, failed), ("checksum", "no tokens"), strict=True):
        thread.join()
        with pytest.raises(UserError, match=named):
            each.check()


def token_file(path, ids):
    """Ids in a .bin, a cache of it that an earlier start has recorded, and its shards."""
    ids.astype("<u2").tofile(path)
    config = DataConfig(
        train_urls=[str(path)], tokenizer="byte", cache_dir=str(path.parent / "cache"), format={"type": "tokens"}
    )
    return Shards.of(build_cache(config, "train"))


def test_an_id_that_changes_between_the_samples_is_found_although_only_the_time_differs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user cache"))
    ids = np.random.default_rng(0).integers(0, 257, 1 << 17)  # twice as much as is sampled
    path, folder = tmp_path / "a.bin", str(tmp_path / "cache" / "train")
    shards = token_file(path, ids)
    for _ in range(2):
        verify(folder, shards)
        shards.check()
        os.utime(path, ns=(0, 0))
    ids[3000] ^= 1
    ids.astype("<u2").tofile(path)
    verify(folder, shards)
    with pytest.raises(UserError, match=r"a.bin: this file has changed"):
        shards.check()
    shutil.rmtree(folder)
    shards = token_file(path, ids)  # a new cache, of what the file has now
    verify(folder, shards)
    shards.check()
