"""Discovery of checkpoints by folder name and manifest."""

import pytest

from lmtrain.checkpoint.discovery import (
    Checkpoint,
    find_checkpoints,
    list_checkpoints,
    list_partial,
    list_set_aside,
    list_without_manifest,
)
from lmtrain.checkpoint.manifest import NAME
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import join


def steps(found) -> list[int]:
    return [checkpoint.step for checkpoint in found]


def test_checkpoints_are_listed_by_number_not_by_name(folder, make_checkpoint):
    for step in (10, 9, 100):
        make_checkpoint(folder, step)
    assert list_checkpoints(folder) == [Checkpoint(step, join(folder, f"step-{step}")) for step in (9, 10, 100)]
    assert list_checkpoints(folder + "/") == list_checkpoints(folder) == find_checkpoints(folder)


@pytest.mark.parametrize("name", ["step-", "step-5.orbax-checkpoint-tmp", "damaged-step-5", "step--5", "Step-5"])
def test_a_manifest_in_a_folder_with_another_name_is_not_a_checkpoint(folder, put, name):
    put(folder, name, NAME)
    assert list_checkpoints(folder) == []
    for path in (folder, join(folder, name)):
        with pytest.raises(UserError, match=r"no complete checkpoint|step-<N>"):
            find_checkpoints(path)


def test_a_step_folder_without_manifest_is_not_a_checkpoint(folder, put, make_checkpoint):
    put(folder, "step-5", "params", "a")
    assert (list_checkpoints(folder), list_without_manifest(folder)) == ([], [join(folder, "step-5")])
    with pytest.raises(UserError, match=r"step-5: .*no complete checkpoint"):
        find_checkpoints(join(folder, "step-5"))
    make_checkpoint(folder, 3)
    assert steps(find_checkpoints(folder)) == [3]
    assert list_without_manifest(folder) == [join(folder, "step-5")]


def test_a_path_may_name_the_checkpoint_the_run_or_any_parent(folder, make_checkpoint):
    run = join(folder, "all", "run")
    for place, step in ((run, 12), (run, 7), (join(folder, "all", "other", "deep"), 9)):
        make_checkpoint(place, step)
    for path in ("", "all", "all/"):
        assert steps(find_checkpoints(join(folder, path))) == [7, 9, 12]
    assert find_checkpoints(run)[-1] == Checkpoint(12, join(run, "step-12"))
    for path in ("all/run/step-7", "all/run/step-7/"):
        assert find_checkpoints(join(folder, path)) == [Checkpoint(7, join(run, "step-7"))]
    assert steps(find_checkpoints(join(folder, "all", "other"))) == [9]
    assert list_checkpoints(join(folder, "all")) == []


@pytest.mark.parametrize("complete", [True, False])
def test_folders_inside_a_step_folder_are_not_searched(folder, put, make_checkpoint, complete):
    make_checkpoint(folder, 3)
    if complete:
        make_checkpoint(folder, 4)
    put(folder, "step-4", "params", "a")
    make_checkpoint(join(folder, "step-4", "params"), 99)
    assert steps(find_checkpoints(folder)) == steps(list_checkpoints(folder)) == ([3, 4] if complete else [3])


def test_a_home_folder_is_expanded(tmp_path, make_checkpoint, monkeypatch):
    made = make_checkpoint(str(tmp_path / "checkpoints"), 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_checkpoints("~/checkpoints") == find_checkpoints("~") == list_checkpoints("~/checkpoints") == [made]
    assert find_checkpoints("~/checkpoints/step-4") == [made]


@pytest.mark.parametrize("name", ["nowhere", "step-5"])
def test_a_missing_path_is_an_error_without_checkpoints(folder, name):
    missing = join(folder, name)
    assert list_checkpoints(missing) == list_without_manifest(missing) == list_partial(missing) == []
    with pytest.raises(UserError, match=f"{name}: no such folder"):
        find_checkpoints(missing)


def test_an_empty_local_folder_is_not_reported_as_missing_and_a_file_is_not_a_checkpoint(tmp_path, make_checkpoint):
    with pytest.raises(UserError, match="no complete checkpoint"):
        find_checkpoints(str(tmp_path))
    make_checkpoint(str(tmp_path), 3)
    (tmp_path / "step-5").write_text("")
    assert steps(list_checkpoints(str(tmp_path))) == [3]


def test_partial_markers_and_set_aside_checkpoints_are_listed_separately(folder, put, make_checkpoint):
    make_checkpoint(folder, 3)
    for name in ("step-20.partial", "step-3.partial", "step-x.partial", "damaged-step-9", "damaged-step-10", "other"):
        put(folder, name, *(["a"] if name.startswith("damaged") else []))
    assert list_partial(folder) == [3, 20]
    assert list_set_aside(folder) == [join(folder, name) for name in ("damaged-step-10", "damaged-step-9")]


def test_links_in_a_loop_are_followed_once(tmp_path, make_checkpoint):
    make_checkpoint(str(tmp_path / "runs" / "a"), 3)
    (tmp_path / "runs" / "1").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "latest").symlink_to(tmp_path / "runs" / "a")
    assert find_checkpoints(str(tmp_path)) == [Checkpoint(3, str(tmp_path / "runs" / "a" / "step-3"))]
