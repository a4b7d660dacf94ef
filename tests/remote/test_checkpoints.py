"""Checkpoints in buckets: Orbax writes to gs:// directly; for s3:// they are staged on a local disk."""

import shutil
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.checkpoint import staging as module
from lmtrain.checkpoint.arrays import load_arrays
from lmtrain.checkpoint.checkpointer import Checkpointer, SaveError
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.discovery import find_checkpoints, list_checkpoints
from lmtrain.checkpoint.run_folder import TakenOverError
from lmtrain.checkpoint.staging import local_copy
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.runtime import storage
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import delete_folder, list_names, rename_folder


def parts(step: int) -> dict:
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000], np.uint32).view(np.float32)
    return {"params": {"a": {"kernel": jnp.full((2, 3), step, jnp.bfloat16)}}, "optimizer": (jnp.asarray(odd),)}


def save(checkpointer: Checkpointer, step: int, kind: Kind = Kind.PERMANENT, names=("params",)) -> None:
    """Save one part only by default: each has a dozen objects."""
    checkpointer.save_now(step, kind, {name: parts(step)[name] for name in names}, {"größe": step})


def load(path: str, part: str, step: int) -> None:
    """Load the part and compare it bit by bit."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), parts(step)[part])
    loaded = jax.tree.leaves(load_arrays(path, part, target))
    saved = jax.tree.leaves(parts(step)[part])
    assert [np.asarray(x).tobytes() for x in loaded] == [np.asarray(x).tobytes() for x in saved]


def steps(store) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(f"{store.url}/run")]


def an_array(store, step: int) -> str:
    """An object with values of the parameters."""
    return "run/" + max(name for name in store.contents("run") if name.startswith(f"step-{step}/params/d/"))


def test_a_saved_checkpoint_is_found_verified_and_loaded(make, store, staging):
    checkpointer = make()
    assert checkpointer.newest() is None
    save(checkpointer, 9)
    save(checkpointer, 10, names=("params", "optimizer"))
    newest = checkpointer.newest()
    assert (newest.step, newest.path) == (10, f"{store.url}/run/step-10")
    assert newest.read_run_info() == {"größe": 10, "step": 10}
    assert [found.step for found in find_checkpoints(store.url)] == [9, 10]
    assert set(newest.read_manifest().files) | {"manifest.json"} == set(store.contents("run/step-10"))
    with local_copy(newest, ["params", "optimizer"], str(staging)) as path:
        assert (path == newest.path) is (store.scheme == "gs")
        for part in ("params", "optimizer"):
            load(path, part, 10)


@pytest.mark.parametrize(
    "corruption", ["flipped bit", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("shorter", "deleted"))]
)
def test_a_corrupt_object_is_found(make, store, corruption, caplog):
    checkpointer = make()
    for step in (1, 2):
        save(checkpointer, step)
    name = an_array(store, 2)
    content = store.get(name)
    if corruption == "deleted":
        store.delete(name)
    else:
        store.put(name, content[:-1] + (bytes([content[-1] ^ 1]) if corruption == "flipped bit" else b""))
    before = store.contents("run/step-2")
    assert choose_checkpoint(store.url, "sizes").step == (2 if corruption == "flipped bit" else 1)
    assert checkpointer.newest().step == 1
    assert f"step-2 is corrupt: {name.removeprefix('run/step-2/')}" in caplog.text
    assert store.contents("run/damaged-step-2") == before
    assert steps(store) == [1]


def test_partial_saves_and_deletions_of_a_killed_process_are_cleaned_up(make, store):
    checkpointer = make()
    save(checkpointer, 1)
    checkpointer.close()
    for name in ("step-1.partial", "step-3.partial", "step-3/params/d/a", "step-3/run.json", "step-2/params/d/a"):
        store.put(f"run/{name}", b"")
    checkpointer = make()
    assert {name.split("/")[0] for name in store.contents("run")} == {"attempt.json", "damaged-step-2", "step-1"}
    assert checkpointer.newest().step == 1


@pytest.fixture
def little_space(monkeypatch):
    """The local disk has 1000 bytes free."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1000, 1000))


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_too_little_space_for_staging_is_reported_with_the_sizes(make, store, staging, little_space, caplog):
    checkpointer = make()
    big = {"params": {"w": jnp.zeros(2_500_000)}}
    with pytest.raises(SaveError):
        checkpointer.save_now(1, Kind.PERMANENT, big, {})
    assert all(part in caplog.text for part in (f"{staging} has 1000 B", "9.5 MiB", "set trainer."))
    assert set(store.contents("run")) == {"attempt.json"}


@pytest.mark.parametrize("scheme", ["gs"], indirect=True)
def test_a_direct_save_needs_no_space_on_the_local_disk(make, little_space):
    checkpointer = make()
    save(checkpointer, 1)
    assert checkpointer.newest().step == 1


@pytest.mark.parametrize("scheme", ["s3"], indirect=True)
def test_a_failed_upload_leaves_no_objects_and_the_next_save_succeeds(make, store, monkeypatch, caplog):
    checkpointer = make()
    with monkeypatch.context() as patch:
        sent = []

        def refused(local, url):
            sent.append(url)
            if len(sent) % 5 == 0:
                raise UserError(f"{url}: cannot be written: Connection reset by peer")
            storage.upload(local, url)

        patch.setattr(module, "upload", refused)
        with pytest.raises(SaveError):
            save(checkpointer, 1)
    assert "cannot be written: Connection reset by peer" in caplog.text
    assert set(store.contents("run")) == {"attempt.json"}
    save(checkpointer, 1)
    assert checkpointer.newest().step == 1


def test_a_missing_bucket_is_reported_at_the_start(scheme, staging, emulators):
    with pytest.raises(UserError, match=rf"^trainer.checkpointer.base_path: {scheme}://no-such-bucket/run"):
        Checkpointer(f"{scheme}://no-such-bucket/run", CheckpointerConfig(staging_dir=str(staging)))


def test_folders_are_listed_renamed_and_deleted_in_buckets(store):
    for name in ("a", "a/b", "a/c/d", "ab"):
        store.put(f"x/{name}/file", name.encode())
    before = store.contents("x/a")
    rename_folder(f"{store.url}/x/a", f"{store.url}/x/new")
    assert store.contents("x/new") == before
    assert list_names(f"{store.url}/x") == ["ab", "new"]
    assert storage.list_files(f"{store.url}/x/new") == {"b/file": 3, "c/d/file": 5, "file": 1}
    delete_folder(f"{store.url}/x/new")
    delete_folder(f"{store.url}/x/none")
    storage.delete_file(f"{store.url}/x/none")
    assert set(store.contents("x")) == {"ab/file"}


def test_the_newest_of_two_starts_wins(make, store):
    older, newer = make(), make()
    with pytest.raises(TakenOverError, match="started again"):
        save(older, 1)
    assert steps(store) == []
    save(newer, 1)
    older.release()
    save(newer, 2)
    assert steps(store) == [1, 2]
