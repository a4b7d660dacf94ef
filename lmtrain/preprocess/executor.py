"""Executors of jobs, which build shards or check texts: this machine or a Ray cluster, with the same result."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.preprocess.job import Job
from lmtrain.preprocess.local import run_locally
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.machine import usable_cores
from lmtrain.runtime.processes import Processes

# Progress of each job, int64 [jobs, COUNTS].
Counts = np.ndarray
OnCounts = Callable[[Counts], None]
Stopped = Callable[[], bool]


@dataclass(frozen=True)
class Executor:
    """Runs jobs. `run(jobs, on_counts, stopped)` yields (number of the job, its result) in any order.

    It reports counts periodically, and raises `StoppedError` soon after `stopped()` is true. A process that does not
    call `run` contributes its cores while it is within `helping()`.
    """

    label: str
    run: Callable[[Sequence[Job], OnCounts, Stopped], Iterator[tuple[int, Any]]]
    helping: Callable[[], AbstractContextManager[object]] = nullcontext


LOCAL = Executor("this machine", run_locally)


def choose_executor(ray: RayConfig, workers: int | None, processes: Processes, background: bool = False) -> Executor:
    """Ray if an address is set or if the run has several processes; otherwise this machine.

    With `background`, local workers run at a lower priority than training.
    """
    address = ray.address or os.environ.get("RAY_ADDRESS")
    if address is None and processes.count == 1:
        label = counted(workers or usable_cores(), "local process", "local processes")
        return Executor(label, partial(run_locally, max_workers=workers, background=background))
    _check_ray(f"ray at {address}" if address else f"a run of {processes.count} processes")
    from lmtrain.preprocess.ray_cluster import cluster, run_on_ray

    label = f"the Ray cluster at {address}" if address else f"a Ray cluster on the {processes.count} hosts of the run"
    joined = partial(cluster, ray, address, processes)

    def run(jobs: Sequence[Job], on_counts: OnCounts, stopped: Stopped) -> Iterator[tuple[int, Any]]:
        with joined() as joined_address:
            yield from run_on_ray(jobs, on_counts, stopped, joined_address, workers)

    return Executor(label, run, joined)


def _check_ray(why: str) -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"{why} preprocesses on Ray, which is not installed: pip install 'lmtrain[ray]', or build the cache "
            "first with `lmtrain preprocess` on one machine"
        )
