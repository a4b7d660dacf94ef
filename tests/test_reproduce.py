"""`tools/reproduce.sh`: every recipe at a small size, and the download of its data."""

import hashlib
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

import pytest
import yaml
from pages import ROOT
from web import serving

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
RECIPES = ROOT / "configs" / "recipes"
NAMES = list(yaml.safe_load((RECIPES / "recipes.yaml").read_text()))
CONTENT = os.urandom(3 << 20)


def reproduce(folder, *arguments, table=RECIPES / "recipes.yaml"):
    code = "import pathlib, sys, reproduce; reproduce.TABLE = pathlib.Path(sys.argv.pop(1)); reproduce.main()"
    command = [sys.executable, "-c", code, table, *arguments, "--check", "--folder", folder]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)


def test_every_recipe_is_listed():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*NAMES, "recipes"}


@pytest.mark.parametrize(
    "name", [name if name == "gpt2_124m" else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_a_recipe_runs_offline_at_a_small_size(name, tmp_path):
    done = reproduce(tmp_path, name)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "check" / "result.json").read_text())
    low, high = result["expected"]
    assert (result["recipe"], result["check"], result["settings"]) == (name, True, [])
    assert low <= result["loss"] <= high
    assert (tmp_path / "check" / "logs" / "run" / "report.html").exists()
    table = yaml.safe_load((RECIPES / "recipes.yaml").read_text())
    table[name]["check"]["band"] = [0.0, low]
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump(table))
    done = reproduce(tmp_path, name, table=other)  # the run is complete: only its loss is compared again
    assert done.returncode == 1
    assert str(other) in done.stderr
    assert json.loads((tmp_path / "check" / "result.json").read_text())["seconds"] >= result["seconds"] > 0


def depth(number: int) -> dict:
    code = "import json, sys, yaml, reproduce; law = yaml.safe_load(reproduce.TABLE.open())['muon_124m']['depth'];"
    code += "path = str(reproduce.RECIPES / 'muon_124m.yaml');"
    code += "print(json.dumps(reproduce.settings_of_depth(path, int(sys.argv[1]), law, [])[0]))"
    command = [sys.executable, "-c", code, str(number)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_the_depth_of_a_recipe_gives_the_recipe_and_another_one_its_scaling_laws():
    def own(path: str):
        value = yaml.safe_load((RECIPES / "muon_124m.yaml").read_text())
        for part in path.split("."):
            value = value[part]
        return float(value) if isinstance(value, str) else value  # 1.9e-13 is a text for this reader

    same, deep = depth(12), depth(20)
    expected = {path: own(path) for path in same}
    for group in expected["optimizer.groups"]:
        group.update({name: float(value) for name, value in group.items() if name != "match"})
    for path, value in same.items():
        assert value == (expected[path] if isinstance(value, list) else pytest.approx(expected[path], rel=1e-5)), path
    tokens = {
        n: each["trainer.train_batch_size"] * each["trainer.num_train_steps"] for n, each in ((12, same), (20, deep))
    }
    # 12 D^2 N of a block and V D of the head
    parameters = {n: 12 * n * (64 * n) ** 2 + 50304 * 64 * n for n in tokens}
    assert tokens[20] / tokens[12] == pytest.approx(parameters[20] / parameters[12], rel=0.01)
    assert deep["model.hidden_dim"] == 64 * 20
    assert deep["trainer.train_batch_size"] == 1024  # 512 * 3.7^0.383 = 845, and as a power of two
    assert deep["optimizer.learning_rate"] == pytest.approx(own("optimizer.learning_rate") * 2**0.5, rel=1e-5)
    averaged = [
        each["trainer.num_train_steps"] * each["optimizer.learning_rate"] * each["optimizer.weight_decay"]
        for each in (same, deep)
    ]
    assert averaged[0] == pytest.approx(averaged[1], rel=1e-3)


def test_a_signal_reaches_the_run_which_saves(tmp_path):
    command = [sys.executable, ROOT / "tools" / "reproduce.py", "gpt2_124m", "--check", "--folder", tmp_path]
    log = tmp_path / "check" / "logs" / "run.metrics.jsonl"
    process = subprocess.Popen([*command, "--trainer.num_train_steps=100000"], stderr=subprocess.PIPE, text=True)
    while not (log.exists() and '"train/loss"' in log.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "Traceback" not in errors
    assert list((tmp_path / "check" / "checkpoints" / "run").glob("step-*"))


@pytest.mark.parametrize("setting", ["--model.num_layers=4", "--model={num_layers: 4}", "--optimizer.groups=[]"])
def test_depth_and_a_setting_that_it_sets_are_refused_together(setting, tmp_path):
    done = reproduce(tmp_path, "muon_124m", "--depth=3", setting)
    assert done.returncode == 2
    assert setting.partition("=")[0] in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--folder="], "--folder"),
        (["--folder", "/dev/null/x"], "/dev/null/x"),
        (["--trainer.num_train_stepz=3"], "--trainer.num_train_stepz"),
        (["--trainer.id", "other"], "--trainer.id"),
        (["--depth=3"], "--depth"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[0],
)
def test_mistakes_are_found_before_anything_is_written(arguments, named, tmp_path):
    command = [sys.executable, ROOT / "tools" / "reproduce.py", "gpt2_124m", "--check", "--folder", tmp_path / "new"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


class Interrupted(BaseHTTPRequestHandler):
    """Sends a third of the file at the first request; answers requests for the rest of it."""

    asked: ClassVar[list[str]] = []

    def do_GET(self):
        asked = self.headers.get("Range", "")
        self.asked.append(asked)
        begin = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(CONTENT) - begin))
        self.end_headers()
        self.wfile.write(CONTENT[begin:] if asked else CONTENT[: len(CONTENT) // 3])

    def log_message(self, *_):
        pass


def download(url, checksum, path):
    code = "import sys, pathlib, reproduce; reproduce.download(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))"
    command = [sys.executable, "-c", code, url, checksum, path]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


def test_a_download_continues_where_it_ended_and_is_compared_with_its_checksum(tmp_path):
    path, checksum = tmp_path / "file", hashlib.sha256(CONTENT).hexdigest()
    Interrupted.asked.clear()
    with serving(Interrupted) as address:
        url = f"http://{address}/file"
        done = download(url, checksum, path)
        assert done.returncode == 2
        assert url in done.stderr
        assert not path.exists()
        done = download(url, "0" * 64, path)
        assert done.returncode == 2
        assert checksum in done.stderr
        assert list(tmp_path.iterdir()) == []
        assert download(url, checksum, path).returncode == 2
        assert download(url, checksum, path).returncode == 0
    assert path.read_bytes() == CONTENT
    assert download(url, "0" * 64, path).returncode == 2  # the file is compared at every start
    third = f"bytes={len(CONTENT) // 3}-"
    assert Interrupted.asked == ["", third, "", third]
    assert download("http://127.0.0.1:1/file", checksum, tmp_path / "other").returncode == 2


def test_the_hub_of_a_recipe_out_of_reach_is_one_message(tmp_path):
    command = [sys.executable, ROOT / "tools" / "reproduce.py", "gpt2_124m", "--folder", tmp_path]
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "http://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
