"""Builds on a real Ray cluster on this machine: the same bytes and errors as local builds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_SECONDS = 300


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def address():
    """A cluster of one node with two cores."""
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port", str(port), "--block"]
    options = ["--num-cpus", "2", "--include-dashboard", "false", "--disable-usage-stats"]
    options += ["--object-store-memory", "80000000", "--node-ip-address", "127.0.0.1"]
    node = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}"
    node.terminate()
    node.wait(300)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number, count in enumerate((30, 4000, 0, 4000)):
        lines = (json.dumps({"text": f"the river {number} counts {i * 7919 % 10007} and {i}"}) for i in range(count))
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def config(settings, write_config, texts):
    settings["data"] |= {"train_urls": [f"{texts}/{{0..3}}.jsonl"], "validation_urls": None}
    return write_config(settings)


def contents(folder: Path):
    return {path.name: path.read_bytes() for path in (folder / "cache" / "train").iterdir()}


@pytest.fixture
def undisturbed(config, lmtrain, tmp_path):
    built = lmtrain("preprocess", config)
    assert built.returncode == 0, built.stderr
    (tmp_path / "cache").rename(tmp_path / "local")
    return {path.name: path.read_bytes() for path in (tmp_path / "local" / "train").iterdir()}


@pytest.mark.long
def test_a_cluster_gives_the_bytes_of_a_local_build(config, lmtrain, undisturbed, address, tmp_path):
    done = lmtrain("preprocess", config, "--address", address)
    assert done.returncode == 0, done.stderr
    assert f"4 shards to build, the Ray cluster at {address}" in done.stderr
    assert "Ray cluster at 127.0.0.1" in done.stderr
    assert "8,030 documents" in done.stderr
    assert contents(tmp_path) == undisturbed


@pytest.mark.long
def test_a_cluster_finds_the_duplicates_that_a_local_check_finds(config, lmtrain, texts, address, tmp_path):
    (tmp_path / "again.jsonl").write_bytes((texts / "0.jsonl").read_bytes())
    urls = json.dumps([f"{texts}/1.jsonl", f"{texts}/0.jsonl", "again.jsonl"])
    for name, flags in (("local", []), ("ray", ["--address", address])):
        folder = ["--data.train_urls", urls, "--data.cache_dir", name]
        lmtrain("preprocess", config, "--check-duplicates", *folder, *flags, code=0)
    report = (tmp_path / "ray" / "check.json").read_text()
    assert report == (tmp_path / "local" / "check.json").read_text()
    assert json.loads(report)["sources"]["train"]["duplicates"] == {"train": 30}


def test_the_address_may_come_from_the_environment(config, lmtrain, address, tmp_path):
    done = lmtrain("preprocess", config, "--dry-run", RAY_ADDRESS=address)
    assert f"on the Ray cluster at {address}" in done.stdout, done.stderr


@pytest.mark.long
def test_a_bad_line_is_the_same_error_as_in_a_local_build(config, lmtrain, texts, address, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{broken\n')
    done = lmtrain("preprocess", config, "--address", address, "--data.train_urls", f'["{tmp_path}/bad.jsonl"]')
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"lmtrain: error: {tmp_path}/bad.jsonl:2: not JSON")
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "cache" / "train") == []


@pytest.mark.long
def test_a_killed_worker_is_restarted(config, undisturbed, address, tmp_path):
    command = [sys.executable, "-m", "lmtrain", "preprocess", str(config), "--address", address]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    cache = tmp_path / "cache" / "train"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := list(cache.glob("*.tmp-*"))):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(int(found[0].name.rpartition("-")[2]), signal.SIGKILL)
    _, stderr = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, stderr
    left = contents(tmp_path)
    assert {name: left[name] for name in undisturbed} == undisturbed
    assert set(left) == set(undisturbed)


def test_a_missing_cluster_is_an_error_that_names_its_address(config, lmtrain, monkeypatch):
    from lmtrain.config.errors import UserError
    from lmtrain.preprocess import ray_cluster

    monkeypatch.setattr(ray_cluster, "_CONNECT_SECONDS", 0)
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"trainer\.ray\.address: {nowhere}: no Ray cluster found"):
        ray_cluster._connect(nowhere)


@pytest.mark.long
def test_a_run_of_two_processes_starts_its_own_cluster(config, undisturbed, tmp_path):
    command = [sys.executable, "-m", "lmtrain", "preprocess", str(config)]
    command += ["--trainer.distributed.coordinator_address", f"127.0.0.1:{free_port()}"]
    command += ["--trainer.distributed.num_processes", "2"]
    processes = [
        subprocess.Popen(
            [*command, "--trainer.distributed.process_id", str(number)],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for number in range(2)
    ]
    stderr = [process.communicate(timeout=DEADLINE_SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], stderr
    assert "4 shards to build, a Ray cluster on the 2 hosts of the run" in stderr[0]
    assert contents(tmp_path) == undisturbed
