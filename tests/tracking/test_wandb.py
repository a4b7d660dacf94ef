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
from lmtrain.tracking.wandb import WandbTracker, has_key

KEY = "0123456789" * 4
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
    assert str(folder) in line
    assert "`wandb sync`" in line
    assert code.startswith("key.py: ")  # not saved, as it holds a secret


def test_samples_are_a_table_and_metrics_are_recorded_at_their_steps_with_config_and_summary(offline):
    (path,) = offline[0].glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_text())
    assert (table["columns"], table["data"]) == (["prompt", "text"], [["Once", " upon\na"]])
    rows = []
    for record in offline[3]["history"]:
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.item}
        rows.append((items["_step"], items["train/loss"]))
    assert rows == [(3, 1.5), (7, 1.25)]
    assert updates(offline[3]["config"])["model"] == {"hidden_dim": 32}
    assert updates(offline[3]["summary"])["parameters"] == 7


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_a_mode_of_the_environment_is_logged(monkeypatch, tmp_path, caplog, mode):
    """The variable may be forgotten, and the user expects the run on its page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", mode)
    given = []
    monkeypatch.setattr(wandb, "init", lambda **keywords: given.append(keywords["mode"]))
    with caplog.at_level("INFO", "lmtrain"):
        WandbTracker(WandbConfig(save_code=False), "run-1", ".")
    assert f"WANDB_MODE={mode}" in caplog.text
    assert given == [None]  # W&B reads the variable


def test_the_run_has_the_settings_it_was_given_and_further_keywords_are_passed_to_wandb(offline):
    (run,) = offline[3]["run"]
    assert (run.run_id, run.project, run.display_name, run.run_group, run.entity) == ("run-1", "p", "a name", "g", "e")
    assert (run.notes, run.job_type, run.host) == ("a longer text", "pretraining", "somewhere")
    assert list(run.tags) == ["a", "b"]
    assert updates([run.config])["cluster"] == "west"


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
    """The second start in a folder: W&B stores a file per start, with the same run id. Its mode overrides a key."""
    folder = offline[0]
    settings = {"resume": False, "mode": "offline", "save_code": False}
    assert track(folder, settings, WANDB_API_KEY=KEY) == ("offline", "")
    paths = list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert [read_file(path)["run"][0].run_id for path in paths] == ["run-1", "run-1"]


def test_resume_from_and_fork_from_replace_resume(monkeypatch, tmp_path):
    """W&B accepts only one of the three, and resume is "allow" by default."""
    monkeypatch.chdir(tmp_path)  # no repository, whose remote would be looked up
    given = []
    monkeypatch.setattr(wandb, "init", lambda **keywords: given.append(keywords))
    elsewhere = [{"resume_from": "run-1?_step=7"}, {"fork_from": "run-0?_step=7"}]
    for each in ({}, {"init": elsewhere[0]}, {"init": elsewhere[1], "resume": "must"}):
        WandbTracker(WandbConfig(mode="offline", save_code=False, **each), "run-1", ".")
    names = ("resume", "resume_from", "fork_from")
    found = [{name: keywords[name] for name in names if name in keywords} for keywords in given]
    assert found == [{"resume": "allow"}, *elsewhere]
    for value in (True, False, "allow", "never", "must", "auto"):
        wandb.Settings(resume=value)  # refuses values that it does not know


def test_an_existing_run_of_the_same_id_on_other_data_is_warned_about(monkeypatch, tmp_path, caplog):
    """Two projects with the same settings have the same run id."""
    monkeypatch.chdir(tmp_path)
    for before, warns in (({}, False), ({"data_tokens": "a"}, False), ({"data_tokens": "b"}, True)):
        config = SimpleNamespace(get=before.get, update=lambda values, allow_val_change: None)
        monkeypatch.setattr(wandb, "init", lambda config=config, **_: SimpleNamespace(id="nano-1", config=config))
        tracker = WandbTracker(WandbConfig(mode="offline", save_code=False), "nano-1", ".")
        tracker.hyperparameters({"epoch": 0, "data_tokens": "a"})
        assert ("nano-1" in caplog.text) == warns


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"job_typ": "x"}, "init.job_typ: .*'job_type'"),
        ({"project": "x"}, "trainer.tracker.project"),
        ({"settings": {"init_timeot": 5}}, "settings.init_timeot: .*'init_timeout'"),
        ({"settings": [1]}, "init.settings"),
    ],
)
def test_unknown_keywords_and_settings_of_wandb_are_refused_before_training_starts(keywords, named):
    check_trackers([WandbConfig(init={"notes": "", "settings": {"init_timeout": 5}})])
    with pytest.raises(UserError, match=named):
        check_trackers([WandbConfig(init=keywords)])


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, []),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (({}, ["--host", "http://wandb.example.com:8080"]), ({"NETRC": "other"}, []))
        ),
    ],
)
def test_the_key_stored_by_wandb_login_is_found(monkeypatch, tmp_path, variables, host):
    """Stored by the real command, in a separate home; without the command there is no key."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("WANDB", "NETRC"))]:
        monkeypatch.delenv(name)
    for name, value in ({"HOME": str(tmp_path)} | variables).items():
        monkeypatch.setenv(name, value)
    assert not has_key()
    subprocess.run([sys.executable, "-m", "wandb", "login", "--no-verify", *host, KEY], timeout=120, check=True)
    assert has_key()
