"""All trackers of a config as one: always the JSON log, and the configured ones."""

import json
import threading

import pytest

from lmtrain.tracking.config import JsonConfig, NoopConfig, TensorboardConfig
from lmtrain.tracking.json_log import JsonLog
from lmtrain.tracking.open import Trackers, open_trackers


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def use(trackers):
    trackers.hyperparameters({"a": {"b": 1}})
    trackers.summary({"parameters": 7})
    trackers.log({"train/loss": 1.5}, 1)
    trackers.sync()
    trackers.finish()


@pytest.mark.parametrize("configs", [[], [JsonConfig()], [NoopConfig()], [JsonConfig(), JsonConfig(), NoopConfig()]])
def test_the_json_log_is_always_written_exactly_once(tmp_path, configs):
    use(open_trackers(configs, str(tmp_path / "logs"), "run-1", 0))
    assert read(tmp_path / "logs" / "run-1.metrics.jsonl") == [
        {"step": 0, "parameters": 7},
        {"step": 1, "train/loss": 1.5},
    ]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run-1.metrics.jsonl"]


@pytest.mark.parametrize("ending", ["", "/", "//"])
def test_a_trailing_slash_of_the_folder_does_not_matter(tmp_path, ending):
    use(open_trackers([], f"{tmp_path}{ending}", "run-1", 0))
    assert (tmp_path / "run-1.metrics.jsonl").exists()


@pytest.mark.parametrize(("logdir", "folder"), [("tb", "tb/run-1"), ("tb/${run_id}/x", "tb/run-1/x")])
def test_tensorboard_writes_to_the_folder_of_the_run(tmp_path, logdir, folder):
    use(open_trackers([TensorboardConfig(logdir=f"{tmp_path}/{logdir}")], str(tmp_path), "run-1", 0))
    (path,) = (tmp_path / folder).iterdir()
    assert b"train/loss" in path.read_bytes()


def test_opening_starts_no_thread_and_writes_no_file_of_a_slow_tracker(tmp_path):
    before = threading.active_count()
    trackers = open_trackers([TensorboardConfig(logdir=str(tmp_path / "tb"))], str(tmp_path), "run-1", 0)
    trackers.hyperparameters({})
    assert threading.active_count() == before
    assert not (tmp_path / "tb").exists()
    trackers.finish()


class Recorder:
    def __init__(self):
        self.calls = []

    def call(self, *call):
        self.calls.append(call)

    def finish(self):
        self.calls.append(("finish",))


def test_every_tracker_gets_every_call(tmp_path):
    recorders = [Recorder(), Recorder()]
    use(Trackers(JsonLog(str(tmp_path / "a.jsonl"), 0), recorders))
    expected = [
        ("hyperparameters", {"a": {"b": 1}}),
        ("summary", {"parameters": 7}),
        ("log", {"train/loss": 1.5}, 1),
        ("finish",),
    ]
    assert [recorder.calls for recorder in recorders] == [expected, expected]
