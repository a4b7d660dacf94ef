"""A preprocess job killed with SIGKILL and resumed gives the same bytes as an uninterrupted one."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_SECONDS = 300


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One small file that is finished soon, and two that keep a worker busy for a while."""
    folder = tmp_path_factory.mktemp("sources")
    for name, count in (("a", 20), ("b", 60_000), ("c", 60_000)):
        lines = (json.dumps({"text": f"the river {name} {i * 7919 % 1000003} counts {i}"}) + "\n" for i in range(count))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def preprocess(settings, sources, folder):
    """The command, writing to `folder/cache`."""
    data = settings["data"]
    arguments = {"train_urls": f'["{sources}/{{a,b,c}}.jsonl"]', "validation_urls": "null", "num_preprocess_workers": 1}
    flags = [part for name, value in arguments.items() for part in (f"--data.{name}", str(value))]
    config = folder / "tiny.yaml"
    config.write_text(json.dumps({**settings, "data": {**data, "cache_dir": str(folder / "cache")}}))
    command = [sys.executable, "-m", "lmtrain", "preprocess", str(config), *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, output
    return output


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "cache" / "train").iterdir()}


def wait_for(found, process):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not found():
        assert process.poll() is None, "the build ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory):
    from conftest import tiny_settings

    folder = tmp_path_factory.mktemp("undisturbed")
    finish(preprocess(tiny_settings(), sources, folder))
    return contents(folder)


@pytest.mark.long  # tests/faults/test_preprocess.py kills at random moments
@pytest.mark.parametrize("moment", ["*.arrayrecord.tmp-*", "shard-00000-of-00003.json"])
def test_a_killed_and_resumed_build_equals_an_uninterrupted_one(settings, sources, undisturbed, tmp_path, moment):
    cache: Path = tmp_path / "cache" / "train"
    process = preprocess(settings, sources, tmp_path)
    wait_for(lambda: list(cache.glob(moment)), process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert not (cache / "manifest.json").exists()
    assert not (cache / "shard-00002-of-00003.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in cache.glob("shard-00000-of-00003.json")}

    output = finish(preprocess(settings, sources, tmp_path))
    assert contents(tmp_path) == undisturbed
    assert {name: (cache / name).stat().st_mtime_ns for name in kept} == kept
    if kept:
        assert "1 of 3 shards are finished" in output
