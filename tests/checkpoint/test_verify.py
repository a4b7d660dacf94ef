"""Corruption of any file of a real checkpoint is found before a run resumes from it."""

import os
import re
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.checkpoint.discovery import list_checkpoints, list_set_aside
from lmtrain.checkpoint.manifest import NAME, DamagedError
from lmtrain.checkpoint.verify import choose_checkpoint, newest_intact, verify
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import ALONE
from lmtrain.runtime.storage import join, list_files, rename_folder


def truncate(file: Path, other: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def delete(file: Path, other: Path) -> None:
    file.unlink()


def replace(file: Path, other: Path) -> None:
    shutil.copyfile(other, file)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of steps 5 and 10."""
    run = tmp_path_factory.mktemp("saved") / "run"
    checkpointer = Checkpointer(str(run), CheckpointerConfig())
    for step in (5, 10):
        parts = {"params": {"a": {"kernel": jnp.full((2, 3), 1.0 / step)}}, "optimizer": (jnp.int32(step),)}
        checkpointer.save_now(step, Kind.PERMANENT, parts, {"rows": step * [step]})
    checkpointer.close()
    return run


@pytest.fixture
def run(saved, tmp_path) -> Path:
    """A copy of `saved`."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def newest(run: Path, how: str = "full"):
    checkpointer = Checkpointer(str(run), CheckpointerConfig(verify_on_restore=how))
    try:
        return checkpointer.newest()
    finally:
        checkpointer.close()


def damages(damage, saved: Path) -> list[str]:
    """The files of step 10 that this damage applies to."""
    names = list(list_files(str(saved / "step-10")))
    if damage is not replace:
        return names
    same = [name for name in names if (saved / "step-5" / name).is_file()]
    return [n for n in same if (saved / "step-5" / n).read_bytes() != (saved / "step-10" / n).read_bytes()]


@pytest.mark.parametrize("damage", [truncate, flip, delete, replace])
def test_corruption_of_any_file_is_logged_and_the_previous_checkpoint_is_used(saved, tmp_path, caplog, damage):
    names = damages(damage, saved)
    assert {NAME, "run.json", "params/manifest.ocdbt"} <= set(names)
    for number, name in enumerate(names):
        run = Path(shutil.copytree(saved, tmp_path / str(number)))
        damage(run / "step-10" / name, run / "step-5" / name)
        before = list_files(str(run / "step-10"))
        caplog.clear()
        found = newest(run)
        assert found is not None, name
        assert (found.step, found.path) == (5, str(run / "step-5")), name
        assert f"{run / 'step-10'} is corrupt: " in caplog.text
        assert name == NAME or name in caplog.text
        assert list_files(str(run / "damaged-step-10")) == before
        assert [checkpoint.step for checkpoint in list_checkpoints(str(run))] == [5]


@pytest.mark.parametrize(("damage", "step"), [(truncate, 5), (delete, 5), (flip, 10)])
@pytest.mark.parametrize("name", ["run.json", "params/manifest.ocdbt", NAME])
def test_the_check_of_sizes_finds_only_changed_sizes(run, damage, step, name):
    damage(run / "step-10" / name, run / "step-5" / name)
    assert newest(run, "sizes").step == (5 if name == NAME else step)  # the manifest has its own checksum


@pytest.mark.parametrize(("how", "name"), [("full", "run.json"), ("sizes", "run.json"), ("full", NAME)])
def test_a_run_with_only_corrupt_checkpoints_does_not_start_over(run, how, name):
    for step in ("step-5", "step-10"):
        (run / step / name).unlink()
    for _ in range(2):  # also at the second start
        with pytest.raises(UserError, match=r"damaged-step-10, damaged-step-5.*--trainer.id"):
            newest(run, how)
    assert sorted(os.listdir(run)) == ["damaged-step-10", "damaged-step-5"]


def test_a_restored_copy_is_used_again(run, saved):
    (run / "step-10" / "run.json").unlink()
    assert newest(run).step == 5
    assert list_set_aside(str(run)) == [str(run / "damaged-step-10")]
    shutil.copytree(saved / "step-10", run / "step-10")
    for how in ("full", "sizes"):
        assert newest(run, how).step == 10


def test_a_checkpoint_with_the_step_of_another_is_corrupt(run, caplog):
    shutil.copytree(run / "step-10", run / "step-20")
    assert newest(run).step == 10
    assert "step-20 is corrupt: " in caplog.text


def in_part(run: Path, step: str, part: str) -> Path:
    """The path of a file with arrays of a part."""
    return max((run / step / part / "d").iterdir())


def test_only_the_requested_parts_are_verified_and_choosing_renames_nothing(run, caplog):
    flip(in_part(run, "step-10", "optimizer"), run)
    before = list_files(str(run))
    assert choose_checkpoint(str(run), "full", parts=["params"]).step == 10
    for parts in (None, ["optimizer"], ["params", "optimizer"]):
        assert choose_checkpoint(str(run.parent), "full", parts=parts).step == 5
    assert f"{run}/step-10 is corrupt: " in caplog.text
    assert list_files(str(run)) == before
    flip(run / "step-10" / "run.json", run)  # files outside the parts are always verified
    assert choose_checkpoint(str(run), "full", parts=["params"]).step == 5


def test_choosing_among_corrupt_checkpoints_only_is_an_error_and_all_corrupt_files_are_named(run):
    names = ("_CHECKPOINT_METADATA", "run.json")
    for step in ("step-5", "step-10"):
        for name in names:
            flip(run / step / name, run)
    for place in (run, run / "step-10"):
        with pytest.raises(UserError, match=f"{re.escape(str(place))}: "):
            choose_checkpoint(str(place), "full")
    with pytest.raises(DamagedError, match=f"{names[0]}: .*{names[1]}: "):
        verify(list_checkpoints(str(run))[1], "full")


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
@pytest.mark.parametrize("how", ["full", "sizes"])
def test_a_store_that_does_not_respond_is_not_reported_as_corruption(folder, make_checkpoint, monkeypatch, how):
    """Setting an intact checkpoint aside after a connection error would lose the steps since the previous one."""
    made = make_checkpoint(folder, 5)

    def refuse(*arguments, **keywords):
        raise OSError("503 Slow Down")

    for name in ("_open", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, refuse)
    with pytest.raises(UserError, match="503 Slow Down"):
        newest_intact([made], how, ALONE)


def test_corruption_at_a_url_is_found_too(folder, make_checkpoint, put):
    for step in (1, 2):
        make_checkpoint(folder, step)
    put(folder, "step-2", "params", "d", "a", content=b"params/d/a of         3")
    assert choose_checkpoint(folder, "sizes").step == 2
    assert choose_checkpoint(folder, "full").step == 1
    rename_folder(join(folder, "step-1"), join(folder, "elsewhere"))
    with pytest.raises(UserError, match="it is corrupt"):
        choose_checkpoint(folder, "full")
