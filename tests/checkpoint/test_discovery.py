"""Finding checkpoints by their folders' names."""

import json
import os

import pytest

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoint, list_checkpoints, step_folder
from lmtrain.checkpoint.policies import Kind
from lmtrain.config.errors import UserError


def make(*parts) -> str:
    path = os.path.join(*map(str, parts))
    os.makedirs(path)
    return path


def test_checkpoints_are_listed_by_number_not_by_name(tmp_path):
    for step in (10, 9, 100):
        make(step_folder(tmp_path, step))
    assert [checkpoint.step for checkpoint in list_checkpoints(str(tmp_path))] == [9, 10, 100]


@pytest.mark.parametrize(
    "name", ["step-", "step-5.orbax-checkpoint-tmp-17", "deleting-step-5", "step-x", "xstep-5", "step--5", "Step-5"]
)
def test_other_names_are_not_checkpoints(tmp_path, name):
    make(tmp_path, name)
    assert list_checkpoints(str(tmp_path)) == []
    with pytest.raises(UserError, match="there is no complete checkpoint in it"):
        find_checkpoint(str(tmp_path))


def test_a_file_is_not_a_checkpoint(tmp_path):
    make(tmp_path, "step-3")
    (tmp_path / "step-5").write_text("")
    assert [checkpoint.step for checkpoint in list_checkpoints(str(tmp_path))] == [3]


def test_a_folder_that_does_not_exist_has_none(tmp_path):
    assert list_checkpoints(str(tmp_path / "none")) == []


def test_a_path_may_name_the_checkpoint_the_run_or_any_parent(tmp_path):
    newest = make(tmp_path, "all", "run", "step-12")
    make(tmp_path, "all", "run", "step-7")
    make(tmp_path, "all", "other", "deep", "step-9")
    for path in ("", "all", "all/", "all/run", "all/run/step-12", "all/run/step-12/"):
        assert find_checkpoint(f"{tmp_path}/{path}") == Checkpoint(12, newest)
    assert find_checkpoint(str(tmp_path / "all" / "run" / "step-7")).step == 7
    assert find_checkpoint(str(tmp_path / "all" / "other")).step == 9


def test_folders_inside_a_checkpoint_are_not_searched(tmp_path):
    make(tmp_path, "run", "step-3", "params", "step-99")
    assert find_checkpoint(str(tmp_path)).step == 3


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    make(tmp_path, "checkpoints", "step-4")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoint("~/checkpoints").step == 4


@pytest.mark.parametrize("name", ["nowhere", "step-5", "größe"])
def test_a_path_that_does_not_exist_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=f"{name}: no such folder"):
        find_checkpoint(str(tmp_path / name))


def test_kind_is_read_from_the_run_info(tmp_path):
    folder = make(tmp_path, "step-4", "run")
    with open(os.path.join(folder, "metadata"), "w") as file:
        json.dump({"kind": "temporary", "step": 4}, file)
    checkpoint = find_checkpoint(str(tmp_path))
    assert checkpoint.kind is Kind.TEMPORARY
    assert checkpoint.read_run_info() == {"kind": "temporary", "step": 4}
