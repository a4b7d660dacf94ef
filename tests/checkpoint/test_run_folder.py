"""Content of a run's folder after a start: complete checkpoints, and set-aside ones."""

import os
from contextlib import contextmanager

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lmtrain.checkpoint.config import Kind
from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.manifest import NAME, Manifest, read_manifest, record_files
from lmtrain.checkpoint.run_folder import RunFolder, TakenOverError
from lmtrain.runtime import storage
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import delete_file, join, list_files, list_names, read_bytes, write_json

CLAIMED = {"attempt.json", "lock"}


@pytest.fixture
def start(folder):
    """`start()` opens the run's folder, after releasing the previous claims."""
    if "://" not in folder:
        os.makedirs(folder)
    started = []

    def make():
        for before in started:
            before.claim.release()
        started.append(RunFolder(folder))
        return started[-1]

    yield make
    for made in started:
        made.claim.release()


def save(run: RunFolder, step: int, kind: Kind) -> None:
    run.begin(step)
    path = join(run.path, f"step-{step}")
    if "://" not in path:
        os.makedirs(path)
    write_json(join(path, "run.json"), {"step": step})
    run.complete(Manifest(step=step, kind=kind, saved=0.0, files=record_files(path, ["run.json"])))


@contextmanager
def nothing_can_be_deleted():
    """Deletions fail, as with a file in use on a network disk, or with missing permissions."""

    def busy(*arguments, **keywords):
        raise OSError(16, "Device or resource busy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.shutil, "rmtree", busy)
        patch.setattr(MemoryFileSystem, "rm", busy)
        yield


def names(folder: str) -> list[str]:
    return [name for name in list_names(folder) if name not in CLAIMED]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # being written, and killed before the folder was created
        (["step-2/params/a", "step-2.partial", "step-3.partial"], []),
        # on file systems, Orbax renames its folders when they are complete
        (["step-2.orbax-checkpoint-tmp/params.orbax-checkpoint-tmp/d/a", "step-2.partial"], []),
        # being deleted: the manifest is deleted first
        (["step-2/run.json", "step-2.partial"], []),
        (["notes.txt", "damaged-step-1/a", "exports/step-1/a"], ["damaged-step-1", "exports", "notes.txt"]),
    ],
    ids=["written", "orbax", "deleted", "unrelated"],
)
def test_what_a_killed_process_was_writing_or_deleting_is_deleted(start, folder, put, make_checkpoint, before, after):
    make_checkpoint(folder, 1)
    for path in before:
        put(folder, *path.split("/"))
    start()
    assert names(folder) == sorted([*after, "step-1"])


def test_files_that_a_failed_save_writes_later_are_deleted(start, folder, put):
    """TensorStore's threads continue for a moment, and create missing folders."""
    run = start()
    for step in (5, 50):
        run.begin(step)
        run.discard(step)
        put(folder, f"step-{step}.orbax-checkpoint-tmp", "params", "d", "late")
    run.begin(51)
    assert names(folder) == ["step-51.partial"]
    put(folder, "step-50.orbax-checkpoint-tmp", "params", "d", "later")
    run.release()
    assert names(folder) == ["step-51.partial"]


def test_a_complete_checkpoint_with_a_partial_marker_is_kept(start, folder, put, make_checkpoint):
    made = make_checkpoint(folder, 1)
    before = list_files(made.path)
    put(folder, "step-1.partial")
    start()
    assert names(folder) == ["step-1"]
    assert list_files(made.path) == before


@pytest.mark.parametrize("folder", ["path"], indirect=True)  # object stores have no partially written files
def test_temporary_files_of_a_killed_writer_are_deleted(start, folder, put):
    put(folder, "step-2.partial.tmp-12345")
    put(folder, "attempt.json.tmp-12345")
    start()
    assert names(folder) == []


def test_a_checkpoint_without_manifest_is_set_aside_unchanged(start, folder, make_checkpoint, caplog):
    for expected in ("damaged-step-5", "damaged-step-5.1", "damaged-step-5.2"):
        made = make_checkpoint(folder, 5)
        delete_file(join(made.path, NAME))
        before = {name: read_bytes(join(made.path, name)) for name in list_files(made.path)}
        start()
        assert list_checkpoints(folder) == []
        assert "step-5" not in names(folder)
        assert {name: read_bytes(join(folder, expected, name)) for name in list_files(join(folder, expected))} == before
        assert f"{made.path} was set aside as {expected}" in caplog.text
    assert names(folder) == ["damaged-step-5", "damaged-step-5.1", "damaged-step-5.2"]


def test_a_temporary_checkpoint_is_deleted_when_the_next_is_complete(start, folder):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    run.begin(2)
    assert names(folder) == ["step-1", "step-2.partial"]
    run.discard(2)
    assert names(folder) == ["step-1"]
    save(run, 3, Kind.PERMANENT)
    assert names(folder) == ["step-3"]
    for step, kind in [(13, Kind.TEMPORARY), (20, Kind.PERMANENT), (21, Kind.TEMPORARY)]:
        save(run, step, kind)
    assert names(folder) == ["step-20", "step-21", "step-3"]  # permanent ones are never deleted


def test_temporary_checkpoints_of_an_earlier_start_are_deleted_later_unless_corrupt(
    start, folder, put, make_checkpoint
):
    put(make_checkpoint(folder, 1, Kind.TEMPORARY).path, NAME, content=b"?")
    for step in (2, 3):
        make_checkpoint(folder, step, Kind.TEMPORARY)
    run = start()
    assert names(folder) == ["step-1", "step-2", "step-3"]
    save(run, 4, Kind.TEMPORARY)
    assert names(folder) == ["step-1", "step-4"]


@pytest.mark.parametrize("at_the_next_start", [False, True])
def test_a_failed_deletion_is_logged_and_retried(start, folder, caplog, at_the_next_start):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    with nothing_can_be_deleted():
        save(run, 2, Kind.TEMPORARY)
    assert [checkpoint.step for checkpoint in list_checkpoints(folder)] == [2]
    assert "step-1 could not be deleted" in caplog.text
    if at_the_next_start:
        start()
        assert names(folder) == ["step-2"]
    else:
        save(run, 3, Kind.TEMPORARY)
        assert names(folder) == ["step-3"]


def test_saving_a_step_again_keeps_the_existing_checkpoint_under_another_name(start, folder, make_checkpoint, caplog):
    made = make_checkpoint(folder, 5, Kind.TEMPORARY)
    before = list_files(made.path)
    run = start()
    save(run, 5, Kind.PERMANENT)
    assert names(folder) == ["earlier-step-5", "step-5"]
    assert list_files(join(folder, "earlier-step-5")) == before
    assert read_manifest(join(folder, "step-5")).kind is Kind.PERMANENT
    save(run, 6, Kind.PERMANENT)
    assert names(folder) == ["earlier-step-5", "step-5", "step-6"]


def test_a_run_that_was_taken_over_writes_nothing(start, folder):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    run.begin(2)
    write_json(join(folder, "attempt.json"), {"id": "another"})
    before = list_files(folder)
    with pytest.raises(TakenOverError):
        run.begin(3)
    with pytest.raises(TakenOverError):
        run.complete(Manifest(step=2, kind=Kind.PERMANENT, saved=0.0, files={}))
    assert list_files(folder) == before


def test_a_failed_start_releases_the_folder(start, folder, put):
    put(folder, "step-2", "a")
    put(folder, "step-2.partial")
    with nothing_can_be_deleted():
        with pytest.raises((OSError, UserError), match="Device or resource busy"):
            start()
        assert not CLAIMED & set(list_names(folder))
    start()
    assert names(folder) == []


def test_set_aside_checkpoints_are_never_overwritten(start, folder, put, make_checkpoint):
    """Case: the user has deleted the first of two; another step has the same first digits."""
    put(folder, "damaged-step-5.1", "a", content=b"of before")
    put(folder, "damaged-step-55", "a")
    delete_file(join(make_checkpoint(folder, 5).path, NAME))
    start()
    assert list_files(join(folder, "damaged-step-5.1")) == {"a": 9}
    assert names(folder) == ["damaged-step-5", "damaged-step-5.1", "damaged-step-55"]
