"""Weights & Biases: the real library, offline, in a process and a home of its own."""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict

import pytest
from wandb.proto.wandb_internal_pb2 import Record

RUN = """
import json, logging, sys
from lmtrain.tracking.config import WandbConfig
from lmtrain.tracking.wandb import WandbTracker

logging.basicConfig(level=logging.INFO, format="%(message)s")
settings, folder = json.loads(sys.argv[1]), sys.argv[2]
tracker = WandbTracker(WandbConfig(**settings), "run-1", folder)
tracker.hyperparameters({"model": {"hidden_dim": 32}, "note": None})
tracker.log({"train/loss": 1.5}, 3)
tracker.log({"train/loss": 1.25}, 7)
tracker.summary({"parameters": 7})
tracker.finish()
print(tracker._run.settings.mode)
"""


def track(folder, settings, **environment):
    """Run a tracker in `folder`; returns (mode, stderr)."""
    folder.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(settings), str(folder)],
        cwd=folder,
        env=kept | {"HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def read_records(folder):
    """The records of the one offline run: after 7 bytes, each is crc (4), length (2), type (1; 1 is whole), payload."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, records = path.read_bytes(), 7, defaultdict(list)
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1
        record = Record.FromString(data[at + 7 : at + 7 + length])
        name = record.WhichOneof("record_type")
        records[name].append(getattr(record, name))
        at += length + 7
    return records


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A run with `mode: null` and no key: its folder, mode, stderr and records."""
    folder = tmp_path_factory.mktemp("wandb")
    settings = {"project": "p", "name": "a name", "tags": ["a", "b"], "group": "g", "entity": "e"}
    mode, stderr = track(folder, settings)
    return folder, mode, stderr, read_records(folder)


def test_without_a_key_it_goes_offline_and_says_how_to_send_it_later(offline):
    folder, mode, stderr, _ = offline
    assert mode == "offline"
    assert stderr == f"W&B: no API key found, logging offline under {folder}; send it later with `wandb sync`\n"


def test_the_run_has_the_settings_it_was_given(offline):
    (run,) = offline[3]["run"]
    assert (run.run_id, run.project, run.display_name, run.run_group, run.entity) == ("run-1", "p", "a name", "g", "e")
    assert list(run.tags) == ["a", "b"]


def test_metrics_are_recorded_at_their_steps(offline):
    rows = []
    for record in offline[3]["history"]:
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.item}
        rows.append((items["_step"], items["train/loss"]))
    assert rows == [(3, 1.5), (7, 1.25)]


def test_the_config_and_the_summary_are_recorded(offline):
    records = offline[3]
    config = {update.key: json.loads(update.value_json) for record in records["config"] for update in record.update}
    summary = {update.key: json.loads(update.value_json) for record in records["summary"] for update in record.update}
    assert config["model"] == {"hidden_dim": 32}
    assert summary["parameters"] == 7


def test_the_mode_that_is_set_wins_over_the_key(tmp_path):
    mode, stderr = track(tmp_path, {"mode": "offline", "id": "other"}, WANDB_API_KEY="a" * 40)
    assert (mode, stderr) == ("offline", "")
    (run,) = read_records(tmp_path)["run"]
    assert (run.run_id, run.display_name) == ("other", "run-1")


def test_disabled_writes_nothing(tmp_path):
    mode, stderr = track(tmp_path / "logs", {"mode": "disabled"})
    assert (mode, stderr) == ("disabled", "")
    assert not list(tmp_path.rglob("*.wandb"))
