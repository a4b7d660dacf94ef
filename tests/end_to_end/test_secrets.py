"""Secrets of a config are in no file and in no output of a run: all files and all output are searched for them."""

import json
import shutil
import subprocess
from functools import partial

import pytest
from conftest import CORPUS
from web import QuietFiles, serving

PLANTED = "planted"
KEY = f"{PLANTED}apikey{'0' * 27}"
SIGNATURE = f"X-Amz-Credential={PLANTED}-credential&X-Amz-Date=1&X-Amz-Expires=9&X-Amz-Signature={PLANTED}-signature"


class _Web(QuietFiles):
    """Serves files to those who sign."""

    def send_head(self):
        if f"X-Amz-Signature={PLANTED}-signature" not in self.path:
            return self.send_error(403)
        return super().send_head()


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    folder = tmp_path_factory.mktemp("web")
    for name in ("train.1.jsonl", "validation.jsonl"):
        shutil.copy(CORPUS / name, folder)
    with serving(partial(_Web, directory=str(folder))) as address:
        yield address


@pytest.fixture
def secret_settings(settings, web):
    """Settings with a secret of every kind."""

    def url(name):
        return f"http://someone:{PLANTED}-password@{web}/{name}?version=1&{SIGNATURE}"

    settings["data"] |= {"train_urls": [url("train.1.jsonl")], "validation_urls": [url("validation.jsonl")]}
    settings["trainer"] |= {"num_train_steps": 4, "log_dir": "logs"}
    settings["optimizer"]["lr_schedule"] = "constant"  # the same program for any number of steps
    settings["trainer"]["tracker"] = [
        {
            "type": "wandb",
            "mode": "offline",
            "settings": {"api_key": KEY},
            "config": {"deep": [{"db_password": f"{PLANTED}-password-2"}], "hub_token": f"{PLANTED}-token"},
            "notes": f"see https://host/?access_token={PLANTED}-in-notes",
        },
        {"type": "tensorboard"},
    ]
    return settings


def holding(folder, *ignored):
    """The files below a folder that contain a secret."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".git" not in path.parts)
    return sorted(
        str(path.relative_to(folder))
        for path in files
        if path.name not in ignored and PLANTED.encode() in path.read_bytes()
    )


def git(place, *arguments):
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", place, *who, *arguments], check=True, capture_output=True)


def test_no_file_and_no_output_of_a_run_contains_a_secret(lmtrain, run_cli, write_config, secret_settings, tmp_path):
    write_config(secret_settings | {"hf_save_path": "exports"})
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "remote", "add", "origin", f"https://{PLANTED}-user:x@host/code.git")
    (tmp_path / "main.py").write_text("print(1)\n")
    git(tmp_path, "add", "main.py", "tiny.yaml")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    (tmp_path / "main.py").write_text(f"login('{KEY}')\n")
    urls = json.dumps(secret_settings["data"]["train_urls"])
    done = [
        *(run_cli("config", verb, "tiny.yaml", code=0) for verb in ("check", "show")),
        *(run_cli("preprocess", "tiny.yaml", *flags, code=0) for flags in (["--dry-run"], [])),
        lmtrain("train", "tiny.yaml", "--data.train_urls", urls, code=0),
    ]
    (run,) = (path.name for path in (tmp_path / "checkpoints").iterdir())
    for command in (
        ["train", "tiny.yaml", "--trainer.num_train_steps", "6", "--trainer.tracker", "{type: json}"],
        ["eval", "--run", run],
        ["export-hf", "--run", run, "--output", "export"],
        ["generate", "--run", run, "--prompt", "a", "--max_new_tokens", "1"],
        ["checkpoint", "inspect", f"checkpoints/{run}"],
        ["checkpoint", "list", "checkpoints"],
        ["report", run],
    ):
        done.append(run_cli(*command, code=0))
    assert list(tmp_path.glob("logs/wandb/offline-run-*/run-*.wandb"))
    assert holding(tmp_path) == ["main.py", "tiny.yaml"]  # the user's own
    assert PLANTED not in "".join(ended.stdout + ended.stderr for ended in done)
    assert "version=1&***" in (tmp_path / "logs" / run / "config.yaml").read_text()
    assert "version=1&***" in (tmp_path / "cache" / "train" / "manifest.json").read_text()


def test_a_saved_config_trains_with_secrets_from_the_environment_or_names_them(
    run_cli, write_config, settings, tmp_path, monkeypatch
):
    settings["trainer"] |= {"num_train_steps": 2, "log_dir": "logs", "id": "one"}
    settings["optimizer"]["lr_schedule"] = "constant"
    tracker = {"type": "wandb", "mode": "disabled", "save_code": False, "settings": {"api_key": KEY}}
    settings["trainer"]["tracker"] = tracker
    write_config(settings)
    run_cli("train", "tiny.yaml", code=0)
    again = ["train", "logs/one/config.yaml", "--trainer.num_train_steps", "4"]
    done = run_cli(*again, code=2)
    assert "trainer.tracker[0].init.settings.api_key: set WANDB_API_KEY" in done.stderr
    assert not (tmp_path / "checkpoints" / "one" / "step-4").exists()
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    run_cli(*again, code=0)
    assert (tmp_path / "checkpoints" / "one" / "step-4").exists()
    assert holding(tmp_path, "tiny.yaml") == []


def test_a_run_named_by_its_id_reads_its_text_with_the_secrets_of_its_config(
    run_cli, write_config, secret_settings, tmp_path
):
    secret_settings["trainer"] |= {"tracker": {"type": "json"}, "id": "one", "num_train_steps": 2}
    write_config(secret_settings)
    run_cli("train", "tiny.yaml", code=0)
    first = run_cli("eval", "--run", "one", code=0)  # the cache is finished
    shutil.rmtree(tmp_path / "cache")
    assert "data.validation_urls: the secrets of" in run_cli("eval", "--run", "one", code=2).stderr
    assert run_cli("eval", "--run", "one", "tiny.yaml", code=0).stdout == first.stdout
