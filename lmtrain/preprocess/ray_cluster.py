"""Building shards on a Ray cluster. The only file that knows Ray.

The machines of a cluster must see the same files: inputs and `data.cache_dir` on a shared file system, or at URLs.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray

from lmtrain.config.errors import UserError
from lmtrain.data.manifest import ShardInfo
from lmtrain.preprocess.shard import ShardJob, build_shard
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import Processes
from lmtrain.runtime.signals import StoppedError
from lmtrain.runtime.storage import file_size

_POLL_SECONDS = 0.5
_REPORT_SECONDS = 1.0
_JOIN_SECONDS = 120

# The port of a cluster that a run starts for itself lies so far above that of its coordinator.
_PORT_ABOVE = 1000


def join_cluster(config: RayConfig, address: str | None, processes: Processes) -> str:
    """The address of the cluster to use, started on the hosts of the run if it is to be.

    Every process of a run calls this: the first starts the head, the others join it as workers.
    """
    if address is not None:
        if config.start_workers and processes.count > 1:
            _start_node(["--address", address], "join")
        return address
    if not config.auto_start_cluster or processes.coordinator is None:
        raise UserError(
            f"trainer.ray: a run of {processes.count} processes preprocesses on Ray, but trainer.ray.address is not "
            "set and auto_start_cluster is false; set one, or build the cache with `lmtrain preprocess` first"
        )
    host, port = processes.coordinator.rsplit(":", 1)
    number = int(port) + _PORT_ABOVE if int(port) + _PORT_ABOVE < 65536 else int(port) - _PORT_ABOVE
    if processes.is_first:
        _start_node(["--head", "--port", str(number), "--include-dashboard", "false"], "start")
    elif config.start_workers:
        _start_node(["--address", f"{host}:{number}"], "join")
    return f"{host}:{number}"


def _start_node(arguments: list[str], what: str) -> None:
    """Run `ray start`; a host that is in the cluster already stays as it is."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, "--disable-usage-stats"]
    deadline = time.monotonic() + _JOIN_SECONDS
    while True:
        result = subprocess.run(command, capture_output=True, text=True)
        output = result.stdout + result.stderr
        if result.returncode == 0 or "already running" in output or "already been started" in output:
            return
        if what == "start" or time.monotonic() > deadline:
            raise UserError(f"trainer.ray: `ray start {' '.join(arguments)}` failed: {output.strip()[-500:]}")
        time.sleep(1)  # the head may not be there yet


def build_on_ray(
    jobs: list[ShardJob],
    on_counts: Callable[[np.ndarray], None],
    stopped: Callable[[], bool],
    address: str,
    max_workers: int | None = None,
) -> Iterator[tuple[int, ShardInfo]]:
    """Build all shards, yielding (number of the job, shard) when one is finished, in any order."""
    _connect(address)
    actor: Any = ray.remote(num_cpus=0)(_Progress)
    progress = actor.remote(len(jobs))
    # one core a task: the tokenizer's own threads would be cores that Ray does not know of
    environment = {"env_vars": {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
    task: Any = ray.remote(num_cpus=1, max_retries=3, runtime_env=environment)(_build)
    waiting = list(enumerate(jobs))
    under_way: dict[Any, tuple[int, ShardJob]] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < (max_workers or len(jobs)):
                number, job = waiting.pop(0)
                under_way[task.remote(number, job, os.getcwd(), progress)] = number, job
            done, _ = ray.wait(list(under_way), timeout=_POLL_SECONDS)
            on_counts(ray.get(progress.counts.remote()))
            for reference in done:
                number, job = under_way.pop(reference)
                yield number, _result(reference, job)
            if stopped() and (waiting or under_way):
                raise StoppedError
    finally:
        for reference in under_way:
            ray.cancel(reference, force=True)
        ray.shutdown()


def _connect(address: str) -> None:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="lmtrain")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise UserError(f"trainer.ray.address: {address}: no Ray cluster there: {str(error).splitlines()[0]}") from None
    log.info(f"Ray cluster at {address}: {int(ray.cluster_resources().get('CPU', 0))} cores")


def _result(reference: Any, job: ShardJob) -> ShardInfo:
    """A finished task's shard. Raises what the task raised, as it was raised."""
    try:
        info: ShardInfo = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, UserError) else error) from None
    except (ray.exceptions.RaySystemError, ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
        raise UserError(
            f"{job.source.label}: the Ray worker died four times, most likely killed for using too much memory; "
            f"finished shards are kept: {str(error).splitlines()[0]}"
        ) from None
    if file_size(f"{job.path}.arrayrecord") != info.bytes:
        raise UserError(
            f"{job.path}.arrayrecord: was built on another machine and is not here; data.cache_dir must be a folder "
            "that all machines of the Ray cluster share, or a URL"
        )
    return info


class _Progress:
    """An actor that adds up what the tasks have done."""

    def __init__(self, jobs: int):
        self._counts = np.zeros((jobs, 3), np.int64)

    def set(self, job: int, counts: tuple[int, int, int]) -> None:
        self._counts[job] = counts

    def counts(self) -> np.ndarray:
        return self._counts


def _build(number: int, job: ShardJob, folder: str, progress: Any) -> ShardInfo:
    """The task. Relative paths are those of the process that started it."""
    os.chdir(folder)
    counts = [0, 0, 0]
    told = 0.0

    def report(*increments: int) -> None:
        nonlocal told
        counts[:] = [count + more for count, more in zip(counts, increments, strict=True)]
        if time.monotonic() - told > _REPORT_SECONDS:
            told = time.monotonic()
            progress.set.remote(number, tuple(counts))

    info = build_shard(job, report)
    ray.get(progress.set.remote(number, tuple(counts)))
    return info
