"""Saving and loading of checkpoints: exact bits, atomicity, and failures."""

import os
import resource
import shutil
import threading
from contextlib import contextmanager, nullcontext, suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.checkpoint.arrays import load_arrays
from lmtrain.checkpoint.checkpointer import Checkpointer, SaveError
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.discovery import list_checkpoints
from lmtrain.checkpoint.manifest import check_sizes, wrong_bytes
from lmtrain.checkpoint.run_folder import TakenOverError
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import list_files, write_json

BIG = {"params": {"w": jnp.arange(300_000.0)}}  # more than fits on the full disk below


class Clock:
    """`when_read` is called after each reading."""

    def __init__(self):
        self.now = 0.0
        self.when_read = lambda: None

    def __call__(self) -> float:
        now = self.now
        self.when_read()
        return now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(tmp_path, clock):
    """`make()` opens another checkpointer of the run; all are closed at the end."""
    opened = []

    def open_one(**settings) -> Checkpointer:
        config = CheckpointerConfig(**{"save_interval": "60s", "keep": [{"every": 10}]} | settings)
        opened.append(Checkpointer(str(tmp_path / "run"), config, clock=clock))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        with suppress(SaveError, TakenOverError):
            checkpointer.close()


@contextmanager
def full_disk():
    """Simulate a full disk: no file can grow beyond 64 KiB."""
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save(checkpointer: Checkpointer, step: int, kind: Kind = Kind.PERMANENT, **more) -> float:
    return checkpointer.save(step, kind, {"params": {"w": jnp.full(3, step)}}, {}, **more)


def wait_for_save(step: int) -> None:
    """Wait for the save thread without a call to the checkpointer."""
    for thread in threading.enumerate():
        if thread.name == f"saving step {step}":
            thread.join()


def steps(tmp_path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(str(tmp_path / "run"))]


def names(tmp_path) -> list[str]:
    return sorted(set(os.listdir(tmp_path / "run")) - {"lock", "attempt.json"})


def fail() -> None:
    raise OSError(28, "No space left on device")


def test_run_info_is_saved_with_the_step_and_the_manifest_with_the_kind(make, tmp_path):
    checkpointer = make()
    checkpointer.save_now(3, Kind.TEMPORARY, BIG, {"identity": {"größe": 1}})
    (checkpoint,) = list_checkpoints(str(tmp_path / "run"))
    assert checkpoint.read_run_info() == {"identity": {"größe": 1}, "step": 3}
    manifest = checkpoint.read_manifest()
    assert (manifest.step, manifest.kind) == (3, Kind.TEMPORARY)
    assert sorted([*manifest.files, "manifest.json"]) == sorted(list_files(checkpoint.path))
    check_sizes(checkpoint.path, manifest)
    assert wrong_bytes(checkpoint.path, manifest, manifest.files) == []


@pytest.mark.parametrize("end", ["deleted", "donated"])
def test_the_saved_state_is_that_at_the_time_of_the_call(make, end):
    """The train step donates its state: after `save` returns, the buffers are deleted or overwritten."""
    checkpointer = make()
    params = {"w": jnp.arange(3_000_000, dtype=jnp.float32)}
    checkpointer.save(1, Kind.PERMANENT, {"params": params}, {})
    if end == "donated":
        params = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(params)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert checkpointer.finish()
    target = jax.ShapeDtypeStruct((3_000_000,), np.float32, sharding=jnp.zeros(1).sharding)
    loaded = load_arrays(checkpointer.newest().path, "params", {"w": target})["w"]
    np.testing.assert_array_equal(loaded, np.arange(3_000_000, dtype=np.float32))


def test_a_save_runs_in_the_background_and_the_next_one_waits_for_it(make, clock, tmp_path):
    checkpointer = make()
    asked = threading.Event()

    def slow():
        assert asked.wait(300)
        assert (tmp_path / "run" / "step-1" / "params").is_dir()
        clock.now += 7

    assert save(checkpointer, 1, before_commit=slow) == 0
    assert steps(tmp_path) == checkpointer.take_saved() == []
    clock.when_read = asked.set  # the next save has started
    assert save(checkpointer, 2) == 7
    assert steps(tmp_path)[:1] == [1]
    checkpointer.finish()
    assert checkpointer.take_saved() == [7, 7]  # the second one was called before the first one ended
    assert checkpointer.take_saved() == []


@pytest.mark.parametrize("interval", ["60s", None])
def test_a_save_is_due_one_interval_after_the_start_and_after_the_start_of_each_save(make, clock, interval):
    checkpointer = make(save_interval=interval)

    def expect(*times):
        for now, left in times:
            clock.now = now
            assert checkpointer.seconds_to_next == (left if interval else None)
            assert checkpointer.is_due is (interval is not None and left == 0)

    expect((0, 60), (59, 1), (60, 0), (1000, 0))
    save(checkpointer, 2, Kind.TEMPORARY)
    expect((1000, 60), (1059, 1), (1060, 0))


@pytest.mark.parametrize("obstacle", ["run", "run/lock/in the way", "run/attempt.json/in the way"])
def test_a_folder_that_cannot_be_used_is_an_error_at_start_up(make, tmp_path, obstacle):
    if obstacle == "run":
        (tmp_path / obstacle).write_text("a file with the name of the folder")
    else:
        (tmp_path / obstacle).mkdir(parents=True)
    with pytest.raises(UserError, match=r"trainer.checkpointer.base_path: "):
        make()


FAILURES = {
    "full disk": ({}, "File too large"),
    "before the commit": ({"before_commit": fail}, "No space left on device"),
    "run info": ({"run_info": {"a": {1, 2}}}, "not JSON serializable"),
    "mark": ({}, "Is a directory"),
}


@pytest.fixture(params=FAILURES)
def failing_save(request, tmp_path):
    """`failing_save(checkpointer, step)` starts a save that fails; `failing_save.reason` is the expected reason."""

    def begin(checkpointer, step):
        arguments = {"run_info": {}} | FAILURES[request.param][0]
        if request.param == "mark":
            (tmp_path / "run" / f"step-{step}.partial" / "in the way").mkdir(parents=True)
        with full_disk() if request.param == "full disk" else nullcontext():
            checkpointer.save(step, Kind.TEMPORARY, BIG, **arguments)
            wait_for_save(step)
        if request.param == "mark":
            shutil.rmtree(tmp_path / "run" / f"step-{step}.partial")

    begin.reason = FAILURES[request.param][1]
    return begin


def test_a_failed_save_is_logged_leaves_no_files_and_is_retried(make, clock, tmp_path, caplog, failing_save):
    checkpointer = make(save_interval="5s")
    save(checkpointer, 1, Kind.TEMPORARY)
    checkpointer.finish()
    failing_save(checkpointer, 2)
    checkpointer.take_saved()  # logs it, without waiting for the next save
    assert checkpointer.seconds_to_next == 60
    assert "step 2 could not be saved: " in caplog.text
    assert failing_save.reason in caplog.text
    assert names(tmp_path) == ["step-1"]  # files of step 2 would fill the disk
    for now, asked in ((59.9, False), (60, True)):
        clock.now = now
        assert checkpointer.is_due is asked
    save(checkpointer, 2, Kind.TEMPORARY)
    assert checkpointer.finish()
    assert names(tmp_path) == ["step-2"]
    assert not checkpointer.is_due
    clock.now += 5
    assert checkpointer.is_due


def test_a_failed_save_ends_the_run_with_on_save_error_stop(make, tmp_path, failing_save):
    checkpointer = make(on_save_error="stop")
    failing_save(checkpointer, 2)
    with pytest.raises(SaveError, match=r"step 2 .*trainer.checkpointer.on_save_error") as caught:
        save(checkpointer, 3)
    assert failing_save.reason in str(caught.value)
    assert names(tmp_path) == []


def test_after_a_failed_permanent_save_the_next_save_is_permanent(make):
    """A temporary one would be deleted again, and the next permanent one may be days away."""
    checkpointer = make()
    save(checkpointer, 10, Kind.PERMANENT, before_commit=fail)
    checkpointer.finish()
    assert checkpointer.kind_at(11, last=False, asked=False) is None
    assert checkpointer.kind_at(11, last=False, asked=True) is Kind.PERMANENT
    save(checkpointer, 11, Kind.PERMANENT)
    checkpointer.finish()
    assert checkpointer.kind_at(12, last=False, asked=True) is Kind.TEMPORARY


@pytest.mark.parametrize("failures", [1, 2])
def test_the_last_save_is_retried_once(make, tmp_path, failures):
    left = [fail] * failures
    checkpointer = make()

    def before():
        if left:
            left.pop()()

    if failures == 1:
        checkpointer.save_now(5, Kind.PERMANENT, BIG, {}, before_commit=before)
        assert checkpointer.newest().step == 5
        return
    with pytest.raises(SaveError, match="step 5"):
        checkpointer.save_now(5, Kind.PERMANENT, BIG, {}, before_commit=before)
    assert left == names(tmp_path) == []


def test_a_save_that_cannot_start_deletes_no_complete_checkpoint(make, tmp_path):
    checkpointer = make()
    save(checkpointer, 5)
    checkpointer.finish()
    (tmp_path / "run" / "attempt.json").unlink()
    (tmp_path / "run" / "attempt.json").mkdir()  # or a network disk that does not respond
    save(checkpointer, 5)
    assert not checkpointer.finish()
    (tmp_path / "run" / "attempt.json").rmdir()
    kept = [os.path.dirname(path) for path in list_files(str(tmp_path / "run")) if path.endswith("/manifest.json")]
    assert kept in (["step-5"], ["earlier-step-5"])


@pytest.mark.parametrize("moment", ["before the start", "before the commit"])
def test_a_run_that_was_taken_over_saves_nothing_more(make, tmp_path, moment):
    checkpointer = make()
    save(checkpointer, 1, Kind.TEMPORARY)
    checkpointer.finish()

    def take_over():
        write_json(str(tmp_path / "run" / "attempt.json"), {"id": "another", "started": "now", "host": "there"})

    if moment == "before the start":
        take_over()
        save(checkpointer, 2)
    else:
        save(checkpointer, 2, before_commit=take_over)
    with pytest.raises(TakenOverError, match="now on there"):
        checkpointer.finish()
    assert steps(tmp_path) == [1]
