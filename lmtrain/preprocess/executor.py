"""Executors that build shards: this machine or a Ray cluster, with the same result."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import ShardInfo
from lmtrain.preprocess.local import build_locally
from lmtrain.preprocess.write_shard import ShardJob
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.machine import usable_cores
from lmtrain.runtime.processes import Processes

# Progress of each job, int64 [jobs, COUNTS of lmtrain/preprocess/write_shard.py].
Counts = np.ndarray
OnCounts = Callable[[Counts], None]
Stopped = Callable[[], bool]


@dataclass(frozen=True)
class Executor:
    """Builds shards. `run(jobs, on_counts, stopped)` yields (number of the job, its shard) in any order.

    It reports counts periodically, and raises `StoppedError` soon after `stopped()` is true. A process that does not
    call `run` contributes its cores while it is within `helping()`.
    """

    label: str
    run: Callable[[list[ShardJob], OnCounts, Stopped], Iterator[tuple[int, ShardInfo]]]
    helping: Callable[[], AbstractContextManager[object]] = nullcontext


LOCAL = Executor("this machine", build_locally)


def choose_executor(ray: RayConfig, workers: int | None, processes: Processes, background: bool = False) -> Executor:
    """Ray if an address is set or if the run has several processes; otherwise this machine.

    With `background`, local workers run at a lower priority than training.
    """
    address = ray.address or os.environ.get("RAY_ADDRESS")
    if address is None and processes.count == 1:
        label = counted(workers or usable_cores(), "local process", "local processes")
        return Executor(label, partial(build_locally, max_workers=workers, background=background))
    _check_ray(f"ray at {address}" if address else f"a run of {processes.count} processes")
    from lmtrain.preprocess.ray_cluster import build_on_ray, cluster

    label = f"the Ray cluster at {address}" if address else f"a Ray cluster on the {processes.count} hosts of the run"
    joined = partial(cluster, ray, address, processes)

    def run(jobs: list[ShardJob], on_counts: OnCounts, stopped: Stopped) -> Iterator[tuple[int, ShardInfo]]:
        with joined() as joined_address:
            yield from build_on_ray(jobs, on_counts, stopped, joined_address, workers)

    return Executor(label, run, joined)


def _check_ray(why: str) -> None:
    import importlib.util

    if importlib.util.find_spec("ray") is None:
        raise UserError(
            f"{why} preprocesses on Ray, which is not installed: pip install 'lmtrain[ray]', or build the cache "
            "first with `lmtrain preprocess` on one machine"
        )
