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


@pytest.mark.parametrize("path", ["tools_of_ours.within.Tracker", "tools_of_ours.within:Tracker"])
def test_a_module_of_a_package_on_sys_path_is_found(tmp_path, monkeypatch, path):
    (tmp_path / "elsewhere" / "tools_of_ours").mkdir(parents=True)
    (tmp_path / "elsewhere" / "tools_of_ours" / "within.py").write_text(WHOLE)
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert import_custom(path).__module__ == "tools_of_ours.within"


def test_installed_modules_take_precedence_over_the_current_folder(module):
    (module.parent / "json.py").write_text("raise RuntimeError('not this one')")
    with pytest.raises(UserError, match=r"json.* has no 'Tracker'"):
        import_custom("json.Tracker")
    assert sys.path[-1] == os.getcwd()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("our_tracker.Tracker", ["our_tracker cannot be imported: ModuleNotFoundError", "on PYTHONPATH or installed"]),
        ("our_trackers.within.Tracker", ["our_trackers.within cannot be imported", "'our_trackers' is not a package"]),
        ("our_trackers.Trackr", ["our_trackers.py has no 'Trackr'; did you mean 'Tracker'?"]),
        ("our_trackers:Nothing", ["our_trackers.py has no 'Nothing'"]),
        (
            "our_trackers.Half",
            ["our_trackers.Half is not a tracker: ", "hyperparameters, artifact, finish"],
        ),
        ("our_trackers.number", ["our_trackers.number is not a tracker"]),
        ("sys.Tracker", ["sys has no 'Tracker'"]),
        (".Tracker", ["cannot be imported"]),
    ],
)
def test_import_errors_are_reported(module, path, expected):
    with pytest.raises(UserError) as caught:
        import_custom(path)
    assert str(caught.value).startswith("trainer.tracker: ")
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize("source", ["raise RuntimeError('no licence')", "def :"])
def test_a_module_that_raises_is_reported_with_its_error_before_training_starts(module, source):
    (module.parent / "broken_tracker.py").write_text(source)
    with pytest.raises(UserError, match=r"broken_tracker cannot be imported: (RuntimeError: no licence|SyntaxError: )"):
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
    [
        ({"channel": "x"}, None),
        ({}, "missing a required argument: 'channel'"),
        ({"channel": "x", "colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"channel": "x", "run": "y"}, "run is set by lmtrain"),
    ],
)
def test_arguments_are_checked_before_training_starts(arguments, problem):
    class Own:
        def __init__(self, run, folder, step, channel):
            pass

    if problem is None:
        check_arguments("my.Own", Own, arguments)
        return
    with pytest.raises(UserError, match=f"my.Own is called with run, folder, step .*{problem}"):
        check_arguments("my.Own", Own, arguments)
