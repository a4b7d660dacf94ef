"""Trackio: the real library, in separate processes without network; its SQLite database is read."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from lmtrain.runtime.errors import UserError
from lmtrain.tracking import open
from lmtrain.tracking.config import TrackioConfig
from lmtrain.tracking.open import check_trackers

# Logs [[metrics, step], ...] like a run, through `open_trackers`; then finishes, or waits to be killed.
RUN = """
import json, socket, sys, time

def refuse(*arguments, **keywords):
    print("the network was asked for", *arguments, file=sys.stderr)
    raise OSError("no network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse

from lmtrain.tracking.config import TrackioConfig
from lmtrain.tracking.open import open_trackers

settings, restored, logs, ends = map(json.loads, sys.argv[1:])
trackers = open_trackers([TrackioConfig(**settings)], "logs", "run-1", restored)
trackers.hyperparameters({"model": {"hidden_dim": 32}, "note": None})
trackers.summary({"parameter_count": 7})
trackers.artifact("code", "run-1-code", "code")
for metrics, step in logs:
    trackers.log(metrics, step)
    if "eval/loss" in metrics:
        trackers.text({"Once": " upon"}, step)
if not ends:
    time.sleep(600)
trackers.finish()
"""


def start(folder, restored, logs, ends=True, **settings):
    away = ("TRACKIO", "HF_", "HUGGING_FACE", "XDG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(away)}
    arguments = [settings, restored, logs, ends]
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *map(json.dumps, arguments)],
        cwd=folder,
        env=kept | {"HOME": str(folder), "TRACKIO_DIR": str(folder / "stored")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def track(folder, restored, logs, **settings):
    """Run a start to its end; returns its output."""
    process = start(folder, restored, logs, **settings)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def stored(folder, table, column, project="lmtrain"):
    """The rows of a table as (run id, run name, step or None, value of `column`)."""
    path = folder / "stored" / f"{project}.db"
    if not path.exists():
        return []
    step = "step" if table == "metrics" else "NULL"
    connection = sqlite3.connect(path, timeout=300)
    try:
        rows = connection.execute(f"SELECT run_id, run_name, {step}, {column} FROM {table} ORDER BY id").fetchall()
    except sqlite3.OperationalError:  # not created yet
        return []
    finally:
        connection.close()
    return [(*row[:3], json.loads(row[3])) for row in rows]


def metrics(folder):
    """All stored metrics as (step, name, value), without samples."""
    return [row for row in values(folder) if row[1] != "samples"]


def values(folder):
    rows = stored(folder, "metrics", "metrics")
    return [(step, name, value) for _, _, step, found in rows for name, value in found.items()]


def samples(folder):
    """(step, rows) of the stored tables of samples."""
    return [(step, value["_value"]) for step, name, value in values(folder) if name == "samples"]


def training(*steps):
    return [({"train/loss": step / 4, "train/learning_rate": 0.5}, step) for step in steps]


def expected(*steps):
    return [(step, name, value) for found, step in training(*steps) for name, value in found.items()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder and its output."""
    folder = tmp_path_factory.mktemp("finished")
    logs = [*training(1, 2), ({"eval/loss": 3.5}, 2), *training(3)]
    return folder, track(folder, 0, logs, group="g")


def test_a_run_is_stored_with_its_steps_name_and_config_and_nothing_else_is_written_or_asked(finished):
    ((_, name, _, config),) = stored(finished[0], "configs", "config")
    assert (name, config["model"], config["parameter_count"], config["_Group"]) == ("run-1", {"hidden_dim": 32}, 7, "g")
    assert finished[1] == ""  # neither printed anything nor used the network
    assert {path.name for path in finished[0].iterdir()} == {"stored", "logs"}
    assert metrics(finished[0]) == [*expected(1, 2), (2, "eval/loss", 3.5), *expected(3)]
    assert samples(finished[0]) == [(2, [{"prompt": "Once", "text": " upon"}])]


def test_after_a_kill_the_same_run_resumes_and_no_metric_is_stored_twice_or_missing(tmp_path_factory):
    """Killed when step 6 was stored, and resumed from step 3."""
    folder = tmp_path_factory.mktemp("killed")
    process = start(folder, 0, [*training(1, 2, 3), ({"eval/loss": 3.5}, 3), *training(4, 5, 6)], ends=False)
    while (6, "train/loss", 1.5) not in metrics(folder):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    # killed during the evaluation of step 6, it repeats the steps after its last checkpoint
    assert track(folder, 3, [*training(4, 5, 6), ({"eval/loss": 2.5}, 6), *training(7)]) == ""
    assert sorted(metrics(folder)) == sorted([*expected(*range(1, 8)), (3, "eval/loss", 3.5), (6, "eval/loss", 2.5)])
    assert [step for step, _ in samples(folder)] == [3, 6]
    assert len({row[0] for row in stored(folder, "metrics", "metrics")}) == 1
    assert len(stored(folder, "configs", "config")) == 1


@pytest.mark.long
def test_another_run_of_the_project_is_independent_of_the_steps_of_the_first(finished):
    folder = finished[0]
    before = metrics(folder)
    track(folder, 0, training(1, 2), name="another")
    assert metrics(folder) == [*before, *expected(1, 2)]
    assert [row[1] for row in stored(folder, "configs", "config")] == ["run-1", "another"]


def test_without_the_library_a_run_is_refused_with_install_advice(monkeypatch):
    monkeypatch.setattr(open.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install trackio"):
        check_trackers([TrackioConfig()])
