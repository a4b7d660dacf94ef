"""Builds on a real Ray cluster of two nodes on this machine: the same bytes and errors as local builds."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import run_script

DEADLINE_SECONDS = 300
COMMAND = [sys.executable, "-m", "lmtrain", "preprocess"]

WAIT_FOR_NODES = """
import sys, time
import ray
ray.init(sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[2]):
    time.sleep(0.1)
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def command_line(pid: int) -> str:
    """The command of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class Node:
    """A node of one core: `ray start --block` in a session of its own, which all of its processes share."""

    def __init__(self, folder: Path, *options: str):
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1", *options]
        command += ["--disable-usage-stats", "--object-store-memory", "80000000"]
        # the head asks the nodes for a sign of life twice a second
        environment = os.environ | {"RAY_TMPDIR": str(folder), "RAY_health_check_period_ms": "500"}
        self.process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def pids(self) -> list[int]:
        return [pid for pid in all_pids() if session_of(pid) == self.process.pid and command_line(pid)]

    def kill(self) -> None:
        """Kill all of its processes, as when a machine is lost."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()


class Cluster:
    """A head and one more node, at two addresses of this machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        options = ["--port", str(port), "--node-ip-address", "127.0.0.1", "--include-dashboard", "false"]
        self.head = Node(folder, "--head", *options)
        self.second: Node | None = None

    def start_second(self) -> Node:
        """Start the second node, and wait until the head lists two."""
        if self.second is not None:
            self.second.stop()
        from lmtrain.preprocess.ray_cluster import _wait_for_port

        _wait_for_port(self.address)  # else Ray waits for a minute
        self.second = Node(self.folder, "--address", self.address, "--node-ip-address", "127.0.0.2")
        run_script(WAIT_FOR_NODES, self.address, 2, folder=self.folder)
        return self.second

    def stop(self) -> None:
        for node in (self.second, self.head):
            if node is not None:
                node.stop()


def users(folder: Path) -> list[int]:
    """Processes that have a file in `folder` open, as those of Ray have their logs."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):
            files = (f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd"))
            if any(os.readlink(file).startswith(f"{folder}/") for file in files):
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def ray_folder():
    """Folder of what Ray writes, with a path short enough for its sockets. At the end no process of Ray is left."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield folder
    try:
        wait_until(lambda: not users(folder))
    finally:
        for pid in users(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(ray_folder):
    cluster = Cluster(ray_folder)
    try:
        cluster.start_second()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def address(cluster):
    return cluster.address


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


@contextlib.contextmanager
def started(command: list[object], folder: Path, **environment: str) -> Iterator[subprocess.Popen]:
    """A process that is killed at the end if it still runs. Its stderr goes to `<folder>/stderr.txt`."""
    with (folder / "stderr.txt").open("w") as stderr:
        process = subprocess.Popen(
            list(map(str, command)), cwd=folder, stderr=stderr, env=os.environ | {"JAX_PLATFORMS": "cpu", **environment}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def stop_a_task(cache: Path, *nodes: Node) -> int:
    """Stop a worker of one of the nodes in the middle of a shard of the cache. -> its process id"""
    stopped = 0

    def try_one() -> bool:
        nonlocal stopped
        for file in cache.glob("*.tmp-*"):
            stopped = int(file.name.rpartition("-")[2])
            if session_of(stopped) in [node.process.pid for node in nodes]:
                os.kill(stopped, signal.SIGSTOP)
                if file.exists():
                    return True
                os.kill(stopped, signal.SIGCONT)  # it had just finished
        return False

    wait_until(try_one)
    return stopped


def finish(process: subprocess.Popen, folder: Path) -> str:
    """Wait for a build, which has to succeed. -> its stderr"""
    code = process.wait(DEADLINE_SECONDS)
    stderr = (folder / "stderr.txt").read_text()
    assert code == 0, stderr
    return stderr


@pytest.fixture
def undisturbed(config, lmtrain, tmp_path):
    lmtrain("preprocess", config, code=0)
    (tmp_path / "cache").rename(tmp_path / "local")
    return {path.name: path.read_bytes() for path in (tmp_path / "local" / "train").iterdir()}


@pytest.mark.long
def test_a_cluster_gives_the_bytes_of_a_local_build(config, lmtrain, undisturbed, address, tmp_path):
    done = lmtrain("preprocess", config, "--address", address, code=0)
    assert f"4 shards to build, the Ray cluster at {address}" in done.stderr
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


@pytest.mark.long
def test_a_bad_line_is_the_same_error_as_in_a_local_build(config, lmtrain, texts, address, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{broken\n')
    done = lmtrain("preprocess", config, "--address", address, "--data.train_urls", f'["{tmp_path}/bad.jsonl"]', code=2)
    assert done.stderr.splitlines()[-1].startswith(f"lmtrain: error: {tmp_path}/bad.jsonl:2: not JSON")
    assert os.listdir(tmp_path / "cache" / "train") == []


@pytest.mark.long
def test_a_killed_worker_is_restarted(config, undisturbed, cluster, tmp_path):
    with started([*COMMAND, config, "--address", cluster.address], tmp_path) as process:
        os.kill(stop_a_task(tmp_path / "cache" / "train", cluster.head, cluster.second), signal.SIGKILL)
        finish(process, tmp_path)
    assert contents(tmp_path) == undisturbed


@pytest.mark.long
def test_the_tasks_of_a_lost_node_run_on_the_other(settings, write_config, lmtrain, cluster, tmp_path):
    """A task of each node is stopped in the middle; then the second node is killed. The first builds the rest."""
    for number in range(12):
        lines = (json.dumps({"text": f"the river {number} counts {i * 7919 % 10007} and {i}"}) for i in range(3000))
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    settings["data"] |= {"train_urls": ["{0..11}.jsonl"], "validation_urls": None}
    config = write_config(settings)
    lmtrain("preprocess", config, "--data.cache_dir", "local", code=0)
    cache = tmp_path / "cache" / "train"
    with started([*COMMAND, config, "--address", cluster.address], tmp_path) as process:
        kept = stop_a_task(cache, cluster.head)
        try:
            lost = stop_a_task(cache, cluster.second)
            unfinished = [file.name for file in cache.glob(f"*.tmp-{lost}")]
            cluster.second.kill()
        finally:
            os.kill(kept, signal.SIGCONT)
        finish(process, tmp_path)
    assert len(unfinished) == 1
    assert contents(tmp_path) == {path.name: path.read_bytes() for path in (tmp_path / "local" / "train").iterdir()}
    cluster.start_second()


@pytest.mark.parametrize("error", ["WorkerCrashedError", "LocalRayletDiedError", "NodeDiedError"])
def test_a_task_whose_workers_or_nodes_all_die_is_an_error_that_names_its_source(monkeypatch, error):
    import ray

    from lmtrain.preprocess import ray_cluster
    from lmtrain.runtime.errors import UserError

    def get(reference):
        raise getattr(ray.exceptions, error)(*["lost"] * (error == "NodeDiedError"))

    monkeypatch.setattr(ray, "get", get)
    job = SimpleNamespace(source=SimpleNamespace(label="a.jsonl"))
    with pytest.raises(UserError, match=r"a\.jsonl: "):
        ray_cluster._result(None, job)


def test_a_missing_cluster_is_an_error_that_names_its_address(monkeypatch):
    from lmtrain.preprocess import ray_cluster
    from lmtrain.runtime.errors import UserError

    monkeypatch.setattr(ray_cluster, "_CONNECT_SECONDS", 0)
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=rf"trainer\.ray\.address: {nowhere}: "):
        ray_cluster._connect(nowhere)


@pytest.mark.long
def test_a_run_of_two_processes_starts_its_own_cluster(config, undisturbed, ray_folder, tmp_path):
    command = [*COMMAND, config]
    command += ["--trainer.distributed.coordinator_address", f"127.0.0.1:{free_port()}"]
    command += ["--trainer.distributed.num_processes", "2"]
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(2):
            (folder := tmp_path / str(number)).mkdir()
            flags = ["--trainer.distributed.process_id", number, "--data.cache_dir", tmp_path / "cache"]
            process = started([*command, *flags], folder, RAY_TMPDIR=str(ray_folder))
            processes.append((stack.enter_context(process), folder))
        stderr = [finish(process, folder) for process, folder in processes]
    assert "4 shards to build, a Ray cluster on the 2 hosts of the run" in stderr[0]
    assert contents(tmp_path) == undisturbed
