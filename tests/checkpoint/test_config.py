"""Settings of checkpointing."""

from datetime import timedelta

import pytest
from pydantic import ValidationError

from lmtrain.checkpoint.config import CheckpointerConfig


def test_a_dumped_config_loads_as_an_equal_one():
    config = CheckpointerConfig(save_interval="1h30m", keep=[{"every": 5, "until": 10}, {"every": 50}])
    assert config.save_interval == timedelta(minutes=90)
    assert CheckpointerConfig(**config.model_dump(mode="json")) == config


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
        ([{"every": 0}], "greater than or equal to 1"),
        ([{"every": -10}], "greater than or equal to 1"),
        ([{"every": 1, "until": 0}], "greater than or equal to 1"),
        ([{"until": 5}], "every"),
        ([{"every": True}], "expected a number"),
        ([{"every": 1, "untill": 5}], "untill"),
        (None, "valid list"),
    ],
)
def test_invalid_keep_entries_are_refused(keep, message):
    with pytest.raises(ValidationError, match=message):
        CheckpointerConfig(keep=keep)


@pytest.mark.parametrize("value", [15, "15", "", "m", "-5m", "1 fortnight", True])
def test_an_interval_needs_a_number_and_a_unit(value):
    with pytest.raises(ValidationError):
        CheckpointerConfig(save_interval=value)


def test_null_turns_temporary_checkpoints_off():
    assert CheckpointerConfig(save_interval=None).save_interval is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("verify_on_restore", ["full", "sizes"]),
        ("on_save_error", ["continue", "stop"]),
        ("staging_dir", [None, "/scratch", "~/staging"]),
    ],
)
def test_the_first_of_the_accepted_values_is_the_default(name, values):
    assert getattr(CheckpointerConfig(), name) == values[0]
    assert [getattr(CheckpointerConfig(**{name: value}), name) for value in values] == values


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify_on_restore", "none"),
        ("verify_on_restore", True),
        ("verify_on_restore", None),
        ("verify_on_restore", "FULL"),
        ("on_save_error", "ignore"),
        ("on_save_error", False),
        ("on_save_error", ""),
        ("staging_dir", 1),
        ("staging_dir", ["/scratch"]),
        ("staging_dir", False),
    ],
)
def test_other_values_are_refused(name, value):
    with pytest.raises(ValidationError, match=name):
        CheckpointerConfig(**{name: value})


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
