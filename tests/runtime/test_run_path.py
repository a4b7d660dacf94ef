"""Paths of a run's folders: the run id is appended, or replaces ${run_id}."""

import pytest

from lmtrain.runtime.storage import fill_run_id, run_path


@pytest.mark.parametrize(
    ("base", "path"),
    [
        ("checkpoints//", "checkpoints/r-1"),
        ("/", "/r-1"),
        ("gs://bucket/x/", "gs://bucket/x/r-1"),
        ("x/${run_id}/y/", "x/r-1/y/"),
        ("x/$run_id", "x/$run_id/r-1"),
        ("~/x", "/home/me/x/r-1"),
        ("x/~", "x/~/r-1"),
    ],
)
def test_the_path_of_a_run(base, path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert run_path(base, "r-1") == path


@pytest.mark.parametrize(
    ("path", "filled"), [("logs/", "logs/"), ("~/logs", "/home/me/logs"), ("${run_id}.d", "r-1.d"), ("$HOME", "$HOME")]
)
def test_fill_run_id_appends_nothing(path, filled, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert fill_run_id(path, "r-1") == filled
