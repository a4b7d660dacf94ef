"""Ray executor: builds shards on a Ray cluster. The only file that imports Ray.

The machines of a cluster must see the same files: inputs and `data.cache_dir` on a shared file system, or at URLs.
"""

import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from lmtrain.preprocess.executor import COUNTS, Job
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.signals import StoppedError

_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 60
_END_SECONDS = 5

# Tasks submitted but not finished: each core has a next one, and an autoscaler sees that more cores would be used. All
# jobs at once would take memory for as many arguments, and each wait would be for as many tasks.
_TASKS_PER_CORE = 2

# Errors of a task whose retries all died with their worker or node.
_DEATHS = (
    ray.exceptions.RaySystemError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
)

# Offset of the port of a run's own cluster from the port of its coordinator.
_PORT_ABOVE = 1000


@contextmanager
def cluster(config: RayConfig, address: str | None, processes: Processes) -> Iterator[str]:
    """Context with the address of the cluster; every process of a run enters it.

    Nodes started for the run end with the context: workers on this host that join an existing cluster, or the run's
    own cluster, whose head is on the host of the first process.
    """
    if address is None:
        if not config.auto_start_cluster or processes.coordinator is None:
            raise UserError(
                f"trainer.ray: a run of {processes.count} processes preprocesses on Ray, but no address is set and "
                "auto_start_cluster is false; set address, or build the cache with `lmtrain preprocess` first"
            )
        host, port = processes.coordinator.rsplit(":", 1)
        own = int(port) + _PORT_ABOVE if int(port) + _PORT_ABOVE < 65536 else int(port) - _PORT_ABOVE
        address = f"{host}:{own}"
        if processes.is_first:
            with _node(["--head", "--port", str(own), "--include-dashboard", "false"]):
                yield address
            return
    if config.start_workers and processes.count > 1:
        with _node(["--address", address]):
            yield address
    else:
        yield address


@contextmanager
def _node(arguments: list[str]) -> Iterator[None]:
    """Run this host as a node of a cluster, in a process that ends with the context."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--block", "--disable-usage-stats"]
    stop = threading.Event()

    def keep() -> None:
        """Restart the node when it exits, since the head may not have started yet."""
        while not stop.is_set():
            with tempfile.TemporaryFile() as output:
                process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
                while process.poll() is None and not stop.wait(_POLL_SECONDS):
                    pass
                if process.poll() is None:
                    _end(process)
                    return
                output.seek(0)
                message = output.read().decode(errors="replace").strip()
            log.warning(f"`ray {' '.join(command[3:])}` exited: {message[-300:]}")
            stop.wait(2)

    keeper = threading.Thread(target=keep, name="ray node", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        stop.set()
        keeper.join()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Stop a node and its child processes. A node whose head stopped first would take a minute, so it is killed."""
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_on_ray(
    jobs: Sequence[Job],
    on_counts: Callable[[np.ndarray], None],
    stopped: Callable[[], bool],
    address: str,
    max_workers: int | None = None,
) -> Iterator[tuple[int, Any]]:
    """Run all jobs, yielding (number of the job, result) when one is finished, in any order.

    The counts are those of finished jobs.
    """
    _connect(address)
    # one core per task: Ray does not account for the tokenizer's threads
    environment = {"env_vars": {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
    task: Any = ray.remote(num_cpus=1, max_retries=3, runtime_env=environment)(_run)
    counts = np.zeros((len(jobs), COUNTS), np.int64)
    waiting = deque(enumerate(jobs))
    under_way: dict[Any, tuple[int, Job]] = {}
    limit, counted_at = 0, -math.inf
    try:
        while waiting or under_way:
            if time.monotonic() - counted_at > _POLL_SECONDS:  # nodes join and are lost
                limit = max_workers or _TASKS_PER_CORE * max(1, _cores())
                counted_at = time.monotonic()
            while waiting and len(under_way) < limit:
                number, job = waiting.popleft()
                under_way[task.remote(job, os.getcwd())] = number, job
            done, _ = ray.wait(list(under_way), timeout=_POLL_SECONDS)
            for reference in done:
                number, job = under_way.pop(reference)
                result = _result(reference, job)
                counts[number] = job.counts(result)
                on_counts(counts)
                yield number, result
            if stopped() and (waiting or under_way):
                raise StoppedError
    finally:
        for reference in under_way:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _connect(address: str) -> None:
    """Connect to the cluster, and wait for one that is starting."""
    _wait_for_port(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="lmtrain")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise _unreachable(address, str(error).splitlines()[0]) from None
    log.info(f"Ray cluster at {address}: {_cores()} cores")


def _cores() -> int:
    """Number of cores of the cluster. A request of a millisecond."""
    return int(ray.cluster_resources().get("CPU", 0))


def _wait_for_port(address: str) -> None:
    """Wait for the port of the cluster, since Ray itself retries for seven minutes. `auto` has no port to check."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    deadline = time.monotonic() + _CONNECT_SECONDS
    while port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise _unreachable(address, str(error)) from None
            time.sleep(0.5)


def _unreachable(address: str, reason: str) -> UserError:
    return UserError(f"trainer.ray.address: {address}: no Ray cluster found: {reason}")


def _result(reference: Any, job: Job) -> Any:
    """Result of a finished task. Raises the original error of a failed task."""
    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, UserError) else error) from None
    except _DEATHS as error:
        raise UserError(
            f"{job.source.label}: the Ray worker or its node died four times, most likely killed for using too much "
            f"memory; finished shards are kept: {str(error).splitlines()[0]}"
        ) from None
    job.check(result)
    return result


def _run(job: Job, folder: str) -> Any:
    """The Ray task. Relative paths are relative to the folder of the process that submitted it."""
    os.chdir(folder)
    return job.run(lambda *_: None)
