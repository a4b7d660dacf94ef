"""What a run's folder has after a start: checkpoints, and what was set aside."""

import os
from contextlib import contextmanager

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lmtrain.checkpoint.claim import TakenOverError
from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.manifest import NAME, Manifest, read_manifest, record_files
from lmtrain.checkpoint.policies import Kind
from lmtrain.checkpoint.run_folder import RunFolder
from lmtrain.config.errors import UserError
from lmtrain.runtime import storage
from lmtrain.runtime.storage import delete_file, join, list_files, list_names, read_bytes, write_json

CLAIMED = {"attempt.json", "lock"}


@pytest.fixture
def start(folder):
    """`start()` makes the run's folder one's own, after whoever had it before has ended."""
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
    run.complete(Manifest(step, kind, 0.0, record_files(path, ["run.json"])))


@contextmanager
def nothing_can_be_deleted():
    """Somebody has a file open on a network disk; or the store says no."""

    def busy(*arguments, **keywords):
        raise OSError(16, "Device or resource busy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.shutil, "rmtree", busy)
        patch.setattr(MemoryFileSystem, "rm", busy)
        yield


def names(folder: str) -> list[str]:
    return [name for name in list_names(folder) if name not in CLAIMED]


def test_a_folder_that_was_being_written_is_deleted(start, folder, put, make_checkpoint):
    make_checkpoint(folder, 1)
    put(folder, "step-2", "params", "a")
    put(folder, "step-2.partial")
    put(folder, "step-3.partial")  # killed before there was a folder
    start()
    assert names(folder) == ["step-1"]


def test_what_a_failed_save_still_wrote_after_it_failed_is_deleted(start, folder, put):
    """TensorStore's threads go on for a moment, and make the folders that they miss."""
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


def test_a_failed_save_that_could_not_be_deleted_at_once_is_deleted_at_the_end(start, folder, put):
    """A thread that still writes into a folder keeps it from being deleted."""
    run = start()
    run.begin(5)
    put(folder, "step-5.orbax-checkpoint-tmp", "params", "a")
    with nothing_can_be_deleted():
        run.discard(5)
    assert "step-5.partial" in names(folder)
    run.release()
    assert names(folder) == []


def test_a_folder_that_was_being_deleted_is_deleted(start, folder, put, make_checkpoint):
    """Its manifest goes first, so that it can be told from a complete one."""
    for step in (1, 2):
        make_checkpoint(folder, step)
    put(folder, "step-1.partial")
    delete_file(join(folder, "step-1", NAME))
    start()
    assert names(folder) == ["step-2"]


def test_a_complete_one_whose_mark_is_still_there_stays(start, folder, put, make_checkpoint):
    made = make_checkpoint(folder, 1)
    before = list_files(made.path)
    put(folder, "step-1.partial")
    start()
    assert names(folder) == ["step-1"]
    assert list_files(made.path) == before


@pytest.mark.parametrize("folder", ["path"], indirect=True)  # at gs:// it writes to the step's own folder
def test_what_orbax_left_is_deleted(start, folder, put, make_checkpoint):
    make_checkpoint(folder, 1)
    put(folder, "step-2.orbax-checkpoint-tmp", "params.orbax-checkpoint-tmp", "d", "a")
    put(folder, "step-2.partial")
    start()
    assert names(folder) == ["step-1"]


@pytest.mark.parametrize("folder", ["path"], indirect=True)  # a store has no files that are half written
def test_what_a_killed_writer_of_a_mark_left_is_deleted(start, folder, put):
    put(folder, "step-2.partial.tmp-12345")
    put(folder, "attempt.json.tmp-12345")
    start()
    assert names(folder) == []


def test_what_is_nobodys_stays(start, folder, put):
    put(folder, "notes.txt")
    put(folder, "damaged-step-1", "a")
    put(folder, "exports", "step-1", "a")
    start()
    assert names(folder) == ["damaged-step-1", "exports", "notes.txt"]


def test_one_that_lost_its_manifest_is_set_aside_as_it_is(start, folder, make_checkpoint, caplog):
    for expected in ("damaged-step-5", "damaged-step-5.1", "damaged-step-5.2"):
        made = make_checkpoint(folder, 5)
        delete_file(join(made.path, NAME))
        before = {name: read_bytes(join(made.path, name)) for name in list_files(made.path)}
        start()
        assert list_checkpoints(folder) == []
        assert "step-5" not in names(folder)
        assert {name: read_bytes(join(folder, expected, name)) for name in list_files(join(folder, expected))} == before
        assert f"{made.path} is corrupt: manifest.json is missing" in caplog.text
        assert f"{made.path} was set aside as {expected}" in caplog.text
    assert names(folder) == ["damaged-step-5", "damaged-step-5.1", "damaged-step-5.2"]


def test_nothing_that_was_set_aside_is_written_over(start, folder, put, make_checkpoint):
    """The user has deleted the first of two."""
    put(folder, "damaged-step-5.1", "a", content=b"of before")
    delete_file(join(make_checkpoint(folder, 5).path, NAME))
    start()
    assert list_files(join(folder, "damaged-step-5.1")) == {"a": 9}
    assert len(names(folder)) == 2


def test_numbers_that_begin_alike_are_not_mixed_up(start, folder, put, make_checkpoint):
    put(folder, "damaged-step-55", "a")
    delete_file(join(make_checkpoint(folder, 5).path, NAME))
    start()
    assert names(folder) == ["damaged-step-5", "damaged-step-55"]


def test_a_temporary_one_goes_when_the_next_is_complete_and_not_before(start, folder):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    run.begin(2)
    assert names(folder) == ["step-1", "step-2.partial"]
    run.discard(2)
    assert names(folder) == ["step-1"]
    save(run, 3, Kind.PERMANENT)
    assert names(folder) == ["step-3"]


def test_permanent_ones_never_go(start, folder):
    run = start()
    for step, kind in [(10, Kind.PERMANENT), (13, Kind.TEMPORARY), (20, Kind.PERMANENT), (21, Kind.TEMPORARY)]:
        save(run, step, kind)
    assert names(folder) == ["step-10", "step-20", "step-21"]
    save(start(), 22, Kind.TEMPORARY)
    assert names(folder) == ["step-10", "step-20", "step-22"]


def test_temporary_ones_of_an_earlier_start_are_kept_until_the_next_is_complete(start, folder, make_checkpoint):
    for step in (1, 2):
        make_checkpoint(folder, step, Kind.TEMPORARY)
    make_checkpoint(folder, 3)
    run = start()
    assert names(folder) == ["step-1", "step-2", "step-3"]
    save(run, 4, Kind.TEMPORARY)
    assert names(folder) == ["step-3", "step-4"]


def test_one_whose_kind_cannot_be_read_is_kept(start, folder, put, make_checkpoint):
    put(make_checkpoint(folder, 1, Kind.TEMPORARY).path, NAME, content=b"?")
    save(start(), 2, Kind.TEMPORARY)
    assert names(folder) == ["step-1", "step-2"]


def test_a_temporary_one_that_cannot_be_deleted_is_told_and_tried_again(start, folder, caplog):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    with nothing_can_be_deleted():
        save(run, 2, Kind.TEMPORARY)
    assert [checkpoint.step for checkpoint in list_checkpoints(folder)] == [2]
    assert "step-1 could not be deleted, will retry: " in caplog.text
    assert "Device or resource busy" in caplog.text
    save(run, 3, Kind.TEMPORARY)
    assert names(folder) == ["step-3"]


def test_one_that_could_not_be_deleted_goes_at_the_next_start(start, folder):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    with nothing_can_be_deleted():
        save(run, 2, Kind.PERMANENT)
    start()
    assert names(folder) == ["step-2"]


def test_a_step_that_is_saved_again_keeps_what_was_there(start, folder, make_checkpoint, caplog):
    made = make_checkpoint(folder, 5, Kind.TEMPORARY)
    before = list_files(made.path)
    run = start()
    save(run, 5, Kind.PERMANENT)
    assert names(folder) == ["earlier-step-5", "step-5"]
    assert list_files(join(folder, "earlier-step-5")) == before
    assert read_manifest(join(folder, "step-5")).kind is Kind.PERMANENT
    save(run, 6, Kind.PERMANENT)
    assert names(folder) == ["earlier-step-5", "step-5", "step-6"]


def test_whoever_was_taken_over_writes_nothing(start, folder):
    run = start()
    save(run, 1, Kind.TEMPORARY)
    run.begin(2)
    write_json(join(folder, "attempt.json"), {"id": "another"})
    before = list_files(folder)
    with pytest.raises(TakenOverError):
        run.begin(3)
    with pytest.raises(TakenOverError):
        run.complete(Manifest(2, Kind.PERMANENT, 0.0, {}))
    assert list_files(folder) == before


def test_a_start_that_fails_lets_go_of_the_folder(start, folder, put):
    put(folder, "step-2", "a")
    put(folder, "step-2.partial")
    with nothing_can_be_deleted():
        with pytest.raises((OSError, UserError), match="Device or resource busy"):
            start()
        assert not CLAIMED & set(list_names(folder))
    start()
    assert names(folder) == []


def test_deleting_what_is_not_there_is_no_error(start, folder):
    start().discard(7)
    assert names(folder) == []
