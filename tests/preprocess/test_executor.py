"""The choice of the executor, and its worker processes: their imports, their end, and their errors."""

import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmtrain.data.config import DataConfig
from lmtrain.preprocess import executor
from lmtrain.preprocess.executor import choose_executor, run_locally
from lmtrain.preprocess.sources import describe_source
from lmtrain.preprocess.write_shard import ShardJob
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.errors import RunError, UserError
from lmtrain.runtime.logging import ALONE, Processes
from lmtrain.runtime.machine import usable_cores

SEVERAL = Processes(1, 3, "host:1234")


@pytest.fixture(autouse=True)
def _no_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def label(ray=None, workers=None, processes=ALONE):
    return choose_executor(ray or RayConfig(), workers, processes).label


def test_one_process_without_an_address_builds_locally_and_others_mean_ray(monkeypatch):
    assert label() == f"{usable_cores()} local processes"
    assert label(workers=7) == "7 local processes"
    assert label(RayConfig(address="a:1")) == "the Ray cluster at a:1"
    assert label(processes=SEVERAL) == "a Ray cluster on the 3 hosts of the run"
    monkeypatch.setenv("RAY_ADDRESS", "b:2")
    assert label() == "the Ray cluster at b:2"
    assert label(RayConfig(address="a:1")) == "the Ray cluster at a:1"


@pytest.mark.parametrize(
    ("ray", "processes", "why"),
    [(RayConfig(address="a:1"), ALONE, "ray at a:1"), (RayConfig(), SEVERAL, "a run of 3 processes")],
)
def test_without_ray_installed_its_package_is_named(monkeypatch, ray, processes, why):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"{why} .*'ray\[default\]'"):
        choose_executor(ray, None, processes)


def test_several_processes_join_a_cluster_that_exists_and_start_one_only_if_that_is_set(monkeypatch):
    executor = choose_executor(RayConfig(auto_start_cluster=False), None, SEVERAL)
    with pytest.raises(UserError, match=r"trainer\.ray: .* auto_start_cluster"), executor.helping():
        pass
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **keywords: pytest.fail("a node was started"))
    ray = RayConfig(address="127.0.0.1:1", start_workers=False)
    with choose_executor(ray, None, SEVERAL).helping() as address:
        assert address == "127.0.0.1:1"


DEADLINE_SECONDS = 300

PARENT = """
import sys

from lmtrain.preprocess.executor import run_locally
from lmtrain.preprocess.write_shard import ShardJob
from lmtrain.preprocess.sources import Source
from lmtrain.data.config import DataConfig

import jax  # loaded in a training process, must not be loaded in its workers

folder, tokenizer = sys.argv[1:]
config = DataConfig(tokenizer=tokenizer)
sources = {name: Source(url=f"{folder}/{name}.jsonl", bytes=0, fingerprint="") for name in "ab"}
jobs = [ShardJob(source=sources[name], path=f"{folder}/{name}", config=config, recipe={}) for name in "ab"]
print(list(run_locally(jobs, lambda counts: None, lambda: False, 2)))  # workers do not import this program
"""


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def busy(tmp_path, settings):
    """A process with two workers that wait forever, since their input files are pipes without a writer."""
    for name in "ab":
        os.mkfifo(tmp_path / f"{name}.jsonl")
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py"), str(tmp_path), settings["data"]["tokenizer"]]
    with open(tmp_path / "errors.txt", "w") as errors:
        parent = subprocess.Popen(command, stderr=errors)
    workers = []
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.tmp-*"))) == 2 or parent.poll() is not None)
        workers = [int(path.name.rpartition("-")[2]) for path in tmp_path.glob("*.tmp-*")]
        assert len(set(workers)) == 2
        yield parent, workers
    finally:
        parent.kill()
        parent.wait()
        for pid in workers:
            if running(pid):
                os.kill(pid, signal.SIGKILL)


def test_workers_load_no_jax_outlive_signals_to_the_group_and_end_when_their_parent_is_killed(busy):
    parent, workers = busy
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()  # of multiprocessing, too
    for pid in {*map(int, children), *workers}:
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.1)  # too short for a slow machine: then this test sees less, and does not fail
    assert all(map(running, [*map(int, children), *workers]))
    for pid in workers:
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "array_record" in loaded
        assert "jaxlib" not in loaded
    assert "jaxlib" in Path(f"/proc/{parent.pid}/maps").read_text()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(map(running, workers)))


def test_a_worker_that_is_killed_ends_the_build_with_an_error_that_names_the_signal_and_memory(busy, tmp_path):
    parent, workers = busy
    os.kill(workers[0], signal.SIGKILL)
    assert parent.wait(DEADLINE_SECONDS) == 1
    last = (tmp_path / "errors.txt").read_text().splitlines()[-1]
    assert "SIGKILL" in last
    assert "memory" in last
    wait_for(lambda: not any(map(running, workers)))


BROKEN = """
import multiprocessing

if multiprocessing.parent_process() is not None:
    raise ImportError("a broken library")

class Job:
    pass
"""


def test_a_worker_that_ends_while_it_imports_is_reported_with_its_exit_code(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    import broken_library

    with pytest.raises(RunError, match="exited with code 1") as error:
        list(run_locally([broken_library.Job()], lambda counts: None, lambda: False, 1))
    assert "memory" not in str(error.value)


def test_shards_and_progress_of_several_workers_add_up(tmp_path, settings):
    config = DataConfig(tokenizer=settings["data"]["tokenizer"])
    jobs = []
    for name in "abc":
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(2000)))
        described = describe_source(str(source))
        jobs.append(ShardJob(source=described, path=str(tmp_path / name), config=config, recipe={}))
    seen = []
    built = list(run_locally(jobs, lambda counts: seen.append(counts.tolist()), lambda: False, 2))
    assert sorted((number, info.file) for number, info in built) == [
        (i, f"{c}.arrayrecord") for i, c in enumerate("abc")
    ]
    assert [sum(map(sum, counts)) for counts in seen] == sorted(sum(map(sum, counts)) for counts in seen)
    tokens = {number: info.tokens for number, info in built}
    assert seen[-1] == [[2000, tokens[number], job.source.bytes] for number, job in enumerate(jobs)]


def test_the_limit_of_open_files_is_an_error_with_what_to_raise(monkeypatch):
    def start(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(executor, "ProcessPoolExecutor", start)
    with pytest.raises(UserError, match=r"ulimit -n"):
        list(run_locally([None], lambda counts: None, lambda: False, 1))
