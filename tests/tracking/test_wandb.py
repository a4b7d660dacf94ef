"""Weights & Biases: the real library, offline, in a separate process with its own home folder."""

import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from lmtrain.runtime.errors import UserError
from lmtrain.tracking.config import WandbConfig
from lmtrain.tracking.open import check_trackers
from lmtrain.tracking.wandb import WandbTracker

RUN = """
import json, logging, os, sys
from lmtrain.tracking.config import WandbConfig
from lmtrain.tracking.wandb import WandbTracker

logging.basicConfig(level=logging.INFO, format="%(message)s")
settings, folder = json.loads(sys.argv[1]), sys.argv[2]
sys.argv[0] = os.path.join(folder, "code", "main.py")
tracker = WandbTracker(WandbConfig(**settings), "run-1", folder, ["planted-secret"])
tracker.hyperparameters({"model": {"hidden_dim": 32}, "note": None})
tracker.log({"train/loss": 1.5}, 3)
tracker.log({"train/loss": 1.25}, 7)
tracker.text({"Once": " upon\\na"}, 7)
tracker.summary({"parameters": 7})
if os.path.exists("artifacts"):
    tracker.artifact("artifacts/profile", "run-1-profile", "profile")
    tracker.artifact("artifacts/config.yaml", "a run/of mine: ü-config", "config")
    tracker.artifact("artifacts/config.yaml", "x" * 200 + "-again", "config")
tracker.finish()
print(tracker._run.settings.mode)
"""


def run(folder, script, *arguments, **environment):
    """Run a script in `folder`, which is also its home; returns (stdout, stderr)."""
    folder.mkdir(exist_ok=True)
    away = ("WANDB", "NETRC", "XDG")  # so caches are below the home as well
    kept = {name: value for name, value in os.environ.items() if not name.startswith(away)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=folder,
        env=kept | {"HOME": str(folder), "WANDB_BASE_URL": "http://127.0.0.1:9"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def track(folder, settings, **environment):
    """Run a tracker in `folder`; returns (mode, stderr)."""
    return run(folder, RUN, json.dumps(settings), str(folder), **environment)


def read_records(folder):
    """The records of the one offline run."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return read_file(path)


def read_file(path):
    """Parse chunks after the first 7 bytes, in blocks of 32 KiB: each is crc (4), length (2), type (1), payload.

    Type 1 is a whole record; 2, 3 and 4 are the first, a middle and the last part of one.
    """
    data, at, records, parts = path.read_bytes(), 7, defaultdict(list), b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:  # too little space for a chunk in this block
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts = (parts if kind in (3, 4) else b"") + data[at + 7 : at + 7 + length]
        if kind in (1, 4):
            record = Record.FromString(parts)
            name = record.WhichOneof("record_type")
            records[name].append(getattr(record, name))
        at += length + 7
    return records


def updates(records):
    return {update.key: json.loads(update.value_json) for record in records for update in record.update}


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A run with artifacts, many keywords, `mode: null` and no key: its folder, mode, stderr and records."""
    folder = tmp_path_factory.mktemp("wandb")
    profile = folder / "artifacts" / "profile"
    (profile / "within").mkdir(parents=True)
    (profile / "trace.json").write_text("{}")
    (profile / "within" / "a file.txt").write_text("a")
    code = folder / "code"
    (code / "within").mkdir(parents=True)
    for name, text in {"main.py": "a", "within/b.txt": "b", "key.py": "planted-secret", ".env": "c"}.items():
        (code / name).write_text(text)
    for arguments in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", "-C", str(code), *arguments], check=True)
    (code / "untracked.py").write_text("d")
    (folder / "artifacts" / "config.yaml").write_text("model: {}")
    settings = {"project": "p", "name": "a name", "tags": ["a", "b"], "group": "g", "entity": "e"}
    settings |= {"resume": True, "init": {"notes": "a longer text", "job_type": "pretraining", "force": None}}
    settings["init"] |= {"config": {"cluster": "west"}, "settings": {"host": "somewhere"}}
    mode, stderr = track(folder, settings)
    return folder, mode, stderr, read_records(folder)


def test_without_a_key_it_logs_offline_with_advice_how_to_upload_and_prints_nothing_else(offline):
    folder, mode, stderr, _ = offline
    assert mode == "offline"
    line, code = stderr.splitlines()
    for part in ("no API key", str(folder), "`wandb sync`"):
        assert part in line
    assert code.startswith("key.py: ")  # not saved, as it holds a secret


def test_samples_are_a_table(offline):
    (path,) = offline[0].glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_text())
    assert (table["columns"], table["data"]) == (["prompt", "text"], [["Once", " upon\na"]])


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("offline", "WANDB_MODE=offline, "),
        pytest.param("disabled", "WANDB_MODE=disabled, nothing", marks=pytest.mark.long),
    ],
)
def test_a_mode_of_the_environment_is_logged(tmp_path, mode, message):
    """The variable may be forgotten, and the user expects the run on its page."""
    found, stderr = track(tmp_path, {"project": "p"}, WANDB_MODE=mode, WANDB_API_KEY="0123456789" * 4)
    assert found == mode
    assert message in stderr
    assert bool(list(tmp_path.rglob("*.wandb"))) == (mode == "offline")


def test_the_run_has_the_settings_it_was_given_and_further_keywords_are_passed_to_wandb(offline):
    (run,) = offline[3]["run"]
    assert (run.run_id, run.project, run.display_name, run.run_group, run.entity) == ("run-1", "p", "a name", "g", "e")
    assert (run.notes, run.job_type, run.host) == ("a longer text", "pretraining", "somewhere")
    assert list(run.tags) == ["a", "b"]
    assert updates([run.config])["cluster"] == "west"


def test_metrics_are_recorded_at_their_steps(offline):
    rows = []
    for record in offline[3]["history"]:
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.item}
        rows.append((items["_step"], items["train/loss"]))
    assert rows == [(3, 1.5), (7, 1.25)]


def test_the_config_and_the_summary_are_recorded(offline):
    assert updates(offline[3]["config"])["model"] == {"hidden_dim": 32}
    assert updates(offline[3]["summary"])["parameters"] == 7


def test_artifacts_are_recorded_with_their_files_and_valid_names(offline):
    found = {
        artifact.name: (artifact.type, {entry.path for entry in artifact.manifest.contents})
        for artifact in offline[3]["artifact"]
    }
    assert found == {
        "run-1-code": ("code", {"main.py", "within/b.txt"}),
        "run-1-profile": ("profile", {"trace.json", "within/a file.txt"}),
        "a_run_of_mine___-config": ("config", {"config.yaml"}),
        "x" * 122 + "-again": ("config", {"config.yaml"}),
        "run-run-1-samples": ("run_table", {"samples.table.json"}),
    }


def test_a_restart_resumes_the_run_of_the_same_id(offline):
    """The second start in a folder: W&B stores a file per start, both with the same run id."""
    folder = offline[0]
    _, stderr = track(folder, {"resume": False, "mode": "offline", "save_code": False})
    assert stderr == ""
    paths = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert [read_file(path)["run"][0].run_id for path in paths] == ["run-1", "run-1"]


def test_wandb_accepts_all_values_of_resume_and_resume_from_replaces_it(monkeypatch, tmp_path):
    """It accepts only one of resume, resume_from and fork_from, and resume is "allow" by default."""
    monkeypatch.chdir(tmp_path)  # no repository, whose remote would be looked up
    settings = [{"resume": value} for value in (True, False, "allow", "never", "must", "auto", None)]
    elsewhere = [{"resume_from": "run-1?_step=7"}, {"fork_from": "run-0?_step=7"}]
    settings += [{}, {"init": elsewhere[0]}, {"init": elsewhere[1], "resume": "must"}]
    given = []

    def init(resume=None, resume_from=None, fork_from=None, **others):
        passed = {"resume": resume, "resume_from": resume_from, "fork_from": fork_from}
        given.append({name: value for name, value in passed.items() if value is not None})
        wandb.Settings(**given[-1])  # refuses values that it does not know

    monkeypatch.setattr(wandb, "init", init)
    for each in settings:
        WandbTracker(WandbConfig(mode="offline", save_code=False, **each), "run-1", ".")
    assert given == [*settings[:6], {}, {"resume": "allow"}, *elsewhere]


def test_an_explicit_mode_takes_precedence_over_the_key(tmp_path):
    mode, stderr = track(tmp_path, {"mode": "offline", "id": "other"}, WANDB_API_KEY="a" * 40)
    assert (mode, stderr) == ("offline", "")
    (run,) = read_records(tmp_path)["run"]
    assert (run.run_id, run.display_name) == ("other", "run-1")


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"job_typ": "x"}, "init.job_typ: .*'job_type'"),
        ({"project": "x"}, "trainer.tracker.project"),
        ({"settings": {"init_timeot": 5}}, "settings.init_timeot: .*'init_timeout'"),
        ({"settings": {"init_timeout": "x"}}, "settings.init_timeout"),
        ({"settings": [1]}, "init.settings"),
    ],
)
def test_unknown_keywords_and_settings_of_wandb_are_refused_before_training_starts(keywords, named):
    check_trackers([WandbConfig(init={"notes": "", "settings": {"init_timeout": 5}})])
    with pytest.raises(UserError, match=named):
        check_trackers([WandbConfig(init=keywords)])


KEY = "0123456789" * 4


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, []),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ({}, ["--host", "http://wandb.example.com:8080"]),
                ({"WANDB_BASE_URL": "http://wandb.example.com:8080"}, []),
                ({"NETRC": "other"}, []),
            )
        ),
    ],
)
def test_the_key_stored_by_wandb_login_is_found(tmp_path, variables, host):
    """Stored by the real command, in a separate home; without the command there is no key."""
    code = "from lmtrain.tracking.wandb import has_key; print(has_key())"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))}
    environment = kept | {"HOME": str(tmp_path)} | variables
    keywords = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    login = [sys.executable, "-m", "wandb", "login", "--no-verify", *host, KEY]
    found = []
    for command in ([sys.executable, "-c", code], login, [sys.executable, "-c", code]):
        done = subprocess.run(command, timeout=120, **keywords)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert (found[0], found[2]) == ("False", "True")


class Config(dict):
    """The hyperparameters of a W&B run."""

    def update(self, values, allow_val_change):
        super().update(values)


@pytest.mark.parametrize(
    ("before", "warns"), [({}, False), ({"data_tokens": "a"}, False), ({"data_tokens": "b"}, True)]
)
def test_an_existing_run_of_the_same_id_on_other_data_is_warned_about(before, warns, caplog):
    """Two projects with the same settings have the same run id; the W&B run is replaced by a stand-in."""
    tracker = WandbTracker.__new__(WandbTracker)
    tracker._run = SimpleNamespace(id="nano-123456", config=Config(before))
    tracker.hyperparameters({"epoch": 0, "data_tokens": "a"})
    assert ("nano-123456 was trained on other data" in caplog.text) == warns
    assert tracker._run.config == {"epoch": 0, "data_tokens": "a"}


def test_disabled_writes_nothing(tmp_path):
    mode, stderr = track(tmp_path / "logs", {"mode": "disabled"})
    assert (mode, stderr) == ("disabled", "")
    assert not list(tmp_path.rglob("*.wandb"))
