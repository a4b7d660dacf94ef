"""Local copies of checkpoints at URLs: only what is needed, verified, and only if there is room."""

import os
import shutil
from collections import namedtuple

import pytest

from lmtrain.checkpoint.manifest import DamagedError
from lmtrain.checkpoint.staging import local_copy
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import delete_file, join


@pytest.fixture
def staging(tmp_path):
    """The local staging folder; empty when nothing is in use."""
    (tmp_path / "staging").mkdir()
    yield tmp_path / "staging"
    assert os.listdir(tmp_path / "staging") == []


def test_only_the_requested_parts_of_a_url_are_copied_and_a_path_is_used_as_it_is(folder, make_checkpoint, staging):
    made = make_checkpoint(folder, 5)
    with local_copy(made, ["params"], str(staging)) as path:
        if "://" not in folder:
            assert path == made.path
            return
        assert os.path.dirname(path) == str(staging)
        assert sorted(os.listdir(path)) == ["params", "run.json"]


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
@pytest.mark.parametrize("corruption", ["changed", "deleted"])
def test_corruption_after_verification_is_found_during_the_download(folder, make_checkpoint, put, staging, corruption):
    made = make_checkpoint(folder, 5)
    if corruption == "deleted":
        delete_file(join(made.path, "params/d/a"))
    else:
        put(made.path, "params", "d", "a", content=b"params/d/a of         6")
    with local_copy(made, ["optimizer"], str(staging)):
        pass
    with pytest.raises(DamagedError, match="params/d/a"), local_copy(made, ["params"], str(staging)):
        pass


@pytest.mark.parametrize("folder", ["memory"], indirect=True)
def test_too_little_space_for_a_download_is_reported_with_the_sizes(folder, make_checkpoint, staging, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10, 10))
    with (
        pytest.raises(UserError, match=r"10 B free.*trainer.checkpointer"),
        local_copy(make_checkpoint(folder, 5), ["params"], str(staging)),
    ):
        pass
