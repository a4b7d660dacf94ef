"""Settings of checkpointing."""

import pytest
from pydantic import ValidationError

from lmtrain.checkpoint.config import CheckpointerConfig


@pytest.mark.parametrize("keep", [[], [{"every": 1}], [{"every": 5, "until": 9}, {"every": 7, "until": 10}]])
def test_ascending_until_values_are_accepted(keep):
    assert len(CheckpointerConfig(keep=keep).keep) == len(keep)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([{"every": 1}, {"every": 2, "until": 5}], "only the last entry may be without 'until'"),
        ([{"every": 1}, {"every": 2}], "only the last entry may be without 'until'"),
        ([{"every": 1, "until": 5}, {"every": 2, "until": 5}], r"'until' must increase.*\[5, 5\]"),
        ([{"every": 1, "until": 9}, {"every": 2, "until": 5}, {"every": 3}], r"must increase.*\[9, 5\]"),
        ([{"every": True}], "expected a number"),
    ],
)
def test_invalid_keep_entries_are_refused(keep, message):
    with pytest.raises(ValidationError, match=message):
        CheckpointerConfig(keep=keep)


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "checkpoints/a"),
        ({"base_path": "gs://bucket/x/"}, "gs://bucket/x/a"),
        ({"base_path": "all/${run_id}/steps"}, "all/a/steps"),
        ({"base_path": "one", "append_run_id_to_base_path": False}, "one"),
        ({"base_path": "~/x"}, "/home/me/x/a"),
    ],
)
def test_the_folder_of_a_run(settings, folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert CheckpointerConfig(**settings).run_folder("a") == folder


@pytest.mark.parametrize("path", ["", "memory://x"])
def test_a_folder_that_does_not_last_is_refused(path):
    with pytest.raises(ValidationError, match="base_path"):
        CheckpointerConfig(base_path=path)
