"""Faults in a batch job of `lmtrain preprocess`, after which the next run resumes with the same result."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import run_in_process, tiny_settings
from faults.runs import DEADLINE_SECONDS, finish, output_of, running, wait_for, write_config

PEAK_OF_COMMAND = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with tiny.json, whose data are eight files of one shard each, and its cache, built without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for name in "abcdefgh":
        lines = (json.dumps({"text": f"the river {name} {i * 7919 % 1000003} counts {i}"}) + "\n" for i in range(3000))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    settings = tiny_settings()
    settings["data"] |= {
        "train_urls": [f"{folder}/{{a..h}}.jsonl"],
        "validation_urls": None,
        "num_preprocess_workers": 2,
        "split_bytes": 200_000,
    }
    write_config(folder, settings)
    run_in_process(["preprocess", "tiny.json", "--data.num_preprocess_workers", 1], folder, code=0)
    return folder


@pytest.fixture
def folder(undisturbed, tmp_path):
    shutil.copy(undisturbed / "tiny.json", tmp_path)
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "cache" / "train").iterdir()}


def check_finish(folder, undisturbed):
    run_in_process(["preprocess", "tiny.json"], folder, code=0)
    assert contents(folder) == contents(undisturbed)


@pytest.mark.parametrize("kills", [2, pytest.param(6, marks=pytest.mark.long)])
def test_killed_at_random_moments_it_ends_with_the_same_bytes(folder, undisturbed, kills):
    """Kills at random moments of the time that a complete run takes here. A run that was faster is repeated."""
    started = time.monotonic()
    with running(folder, verb="preprocess") as process:
        assert process.wait(DEADLINE_SECONDS) == 0
    duration = time.monotonic() - started
    shutil.rmtree(folder / "cache")
    moments = random.Random(0)
    marked = [0]
    killed = 0
    while killed < kills:
        with running(folder, verb="preprocess") as process:
            time.sleep(moments.uniform(0.1, 0.8) * duration)
            # the job's main process alone, or with its workers, as when a machine fails
            kill = os.killpg if moments.random() < 0.5 else os.kill
            with contextlib.suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
            code = process.wait()
        if code == -signal.SIGKILL:
            killed += 1
            marked.append(len(list(folder.glob("cache/train/shard-*.json"))))
            assert marked[-1] >= marked[-2]  # finished shards are kept
        else:
            assert contents(folder) == contents(undisturbed)
            shutil.rmtree(folder / "cache")
            marked = [0]
    check_finish(folder, undisturbed)


FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (68 * 1024, resource.RLIM_INFINITY))  # a shard has more
"""


def test_a_full_disk_is_one_clear_error_and_the_next_run_resumes(folder, undisturbed):
    last = finish(folder, verb="preprocess", code=2, before=FULL_DISK).splitlines()[-1]
    assert last.startswith("lmtrain: error: ")
    assert "File too large" in last
    assert not [name for name in contents(folder) if "tmp" in name]
    check_finish(folder, undisturbed)


@pytest.mark.long
def test_a_worker_killed_for_its_memory_is_reported_and_the_next_run_resumes(folder, undisturbed):
    cache = folder / "cache" / "train"
    with running(folder, verb="preprocess") as process:
        found = wait_for(lambda: list(cache.glob("shard-*.json")) and list(cache.glob("*.tmp-*")), [process])
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(found[0].name.rpartition("-")[2]), signal.SIGKILL)  # as the kernel's OOM killer does
        output = output_of(process, 2)
    assert "too much memory" in output
    assert "data.num_preprocess_workers" in output
    check_finish(folder, undisturbed)


def flip(path):
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "corrupt",
    [lambda shard: os.truncate(shard, 5000), lambda shard: shard.unlink(), flip],
    ids=["truncated", "deleted", "flipped byte"],
)
def test_training_refuses_a_corrupt_cache_with_advice(folder, run_cli, undisturbed, corrupt):
    cache = folder / "cache" / "train"
    shutil.copytree(undisturbed / "cache" / "train", cache)
    shard = sorted(cache.glob("*.arrayrecord"))[0]
    corrupt(shard)
    last = run_cli("train", "tiny.json", code=2).stderr.splitlines()[-1]
    assert last.startswith(f"lmtrain: error: cache/train/{shard.name} ")
    assert f"delete cache/train/{shard.stem}.* and cache/train/manifest.json " in last
    for path in (shard, shard.with_suffix(".json"), cache / "manifest.json"):
        path.unlink(missing_ok=True)
    check_finish(folder, undisturbed)


@pytest.mark.long
def test_one_document_of_fifty_megabytes_stays_within_memory(tmp_path):
    """A tokenizer that splits safely tokenizes it in parts; the limit is for the peak memory of every process."""
    settings = tiny_settings()
    settings["data"] |= {"train_urls": ["long.jsonl"], "validation_urls": None, "tokenizer": "byte"}
    write_config(tmp_path, settings)
    text = "words and more words " * 2_500_000
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text[:50_000_000]}) + "\n")
    # through a separate small process: after fork and exec a process's peak includes that of this large one
    command = [sys.executable, "-m", "lmtrain", "preprocess", "tiny.json"]
    measured = [sys.executable, "-c", PEAK_OF_COMMAND, *command]
    done = subprocess.run(measured, cwd=tmp_path, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "1 document, 50,000,001 tokens" in done.stderr
    assert int(done.stdout) < 2_000_000  # kilobytes; in one call the encoder alone uses three times that
