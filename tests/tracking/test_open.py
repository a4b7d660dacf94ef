"""All trackers of a config as one: always the JSON log, and the configured ones."""

import json

import pytest

from lmtrain.tracking.config import JsonConfig, NoopConfig, TensorboardConfig
from lmtrain.tracking.open import open_trackers


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def use(trackers):
    trackers.hyperparameters({"a": {"b": 1}})
    trackers.summary({"parameters": 7})
    trackers.log({"train/loss": 1.5}, 1)
    trackers.sync()
    trackers.finish()


@pytest.mark.parametrize("configs", [[], [JsonConfig(), JsonConfig(), NoopConfig()]])
def test_the_json_log_is_always_written_exactly_once(tmp_path, configs):
    use(open_trackers(configs, f"{tmp_path}/logs//", "run-1", 0))
    assert read(tmp_path / "logs" / "run-1.metrics.jsonl") == [
        {"step": 0, "parameters": 7},
        {"step": 1, "train/loss": 1.5},
    ]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run-1.metrics.jsonl"]


@pytest.mark.parametrize(("logdir", "folder"), [("tb", "tb/run-1"), ("tb/${run_id}/x", "tb/run-1/x")])
def test_tensorboard_writes_to_the_folder_of_the_run(tmp_path, logdir, folder):
    use(open_trackers([TensorboardConfig(logdir=f"{tmp_path}/{logdir}")], str(tmp_path), "run-1", 0))
    (path,) = (tmp_path / folder).iterdir()
    assert b"train/loss" in path.read_bytes()
