"""Custom trackers: imported by their path, and errors are reported before training starts."""

import json
import os
import sys

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.tracking.config import CustomConfig
from lmtrain.tracking.open import check_trackers, open_trackers
from lmtrain.tracking.tracker import check_arguments, import_custom

WHOLE = """
import json, os

class Tracker:
    def __init__(self, run, folder, step, unit="steps"):
        self._path, self._calls = os.path.join(os.path.dirname(__file__), "calls.json"), [[run, folder, step, unit]]

    def hyperparameters(self, config):
        self._calls.append(["hyperparameters", config])

    def log(self, metrics, step):
        self._calls.append(["log", metrics, step])

    def summary(self, values):
        self._calls.append(["summary", values])

    def artifact(self, path, name, kind):
        self._calls.append(["artifact", path, name, kind])

    def finish(self):
        with open(self._path, "w") as file:
            json.dump(self._calls, file)


class Half:
    def log(self, metrics, step): ...
    def summary(self, values): ...
    finish = None


number = 3
"""


@pytest.fixture(autouse=True)
def imports(monkeypatch):
    """Undo a test's changes of importable modules."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """`our_trackers.py` in the current folder, which is not on sys.path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "our_trackers.py").write_text(WHOLE)
    return tmp_path / "our_trackers.py"


@pytest.mark.parametrize("path", ["our_trackers.Tracker", "our_trackers:Tracker"])
def test_a_module_in_the_current_folder_is_found(module, path):
    found = import_custom(path)
    assert (found.__module__, found.__name__) == ("our_trackers", "Tracker")


def test_installed_modules_take_precedence_over_the_current_folder(module):
    (module.parent / "json.py").write_text("raise RuntimeError('not this one')")
    with pytest.raises(UserError, match=r"json.* has no 'Tracker'"):
        import_custom("json.Tracker")
    assert sys.path[-1] == os.getcwd()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("our_tracker.Tracker", ["our_tracker ", "ModuleNotFoundError"]),
        ("our_trackers.Trackr", ["our_trackers.py", "'Trackr'", "'Tracker'?"]),
        ("our_trackers.Half", ["our_trackers.Half", "hyperparameters, artifact, finish"]),
        ("our_trackers.number", ["our_trackers.number"]),
    ],
)
def test_import_errors_are_reported(module, path, expected):
    with pytest.raises(UserError) as caught:
        import_custom(path)
    assert str(caught.value).startswith("trainer.tracker: ")
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize(("source", "error"), [("raise RuntimeError('no licence')", "no licence"), ("def :", "Syntax")])
def test_a_module_that_raises_is_reported_with_its_error_before_training_starts(module, source, error):
    (module.parent / "broken_tracker.py").write_text(source)
    with pytest.raises(UserError, match=f"broken_tracker .*{error}"):
        check_trackers([CustomConfig(type="broken_tracker.Tracker")])


def test_a_run_passes_it_the_arguments_and_every_call(module, tmp_path):
    config = CustomConfig(type="our_trackers.Tracker", arguments={"unit": "tokens"})
    trackers = open_trackers([config], "logs/", "run-1", 5)
    trackers.hyperparameters({"a": 1})
    trackers.summary({"parameter_count": 7})
    trackers.log({"train/loss": 0.5}, 6)
    trackers.artifact("logs/run-1/code", "run-1-code", "code")
    trackers.finish()

    assert json.loads((tmp_path / "calls.json").read_text()) == [
        ["run-1", "logs/run-1", 5, "tokens"],
        ["hyperparameters", {"a": 1}],
        ["summary", {"parameter_count": 7}],
        ["log", {"train/loss": 0.5}, 6],
        ["artifact", "logs/run-1/code", "run-1-code", "code"],
    ]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"channel": "x"}, None), ({}, "channel"), ({"channel": "x", "colour": "red"}, "colour"), ({"run": "y"}, "run")],
)
def test_arguments_are_checked_before_training_starts(arguments, problem):
    class Own:
        def __init__(self, run, folder, step, channel):
            pass

    if problem is None:
        check_arguments("my.Own", Own, arguments)
        return
    with pytest.raises(UserError, match=f"my.Own .*{problem}"):
        check_arguments("my.Own", Own, arguments)
