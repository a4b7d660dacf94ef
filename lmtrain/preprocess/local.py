"""Building shards on this machine, one process per core. Workers are spawned, so that they import no JAX."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.preprocess.shard import ShardJob, build_shard

_POLL_SECONDS = 0.2

Counts = tuple[int, int, int]

# In a worker: documents, tokens and input bytes done by all workers, shared with the parent.
_counters: Any = None


def usable_cores() -> int:
    """Cores this process may use, which in a container or under Slurm is less than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_locally(
    jobs: list[ShardJob], max_workers: int | None, on_progress: Callable[[Counts], None]
) -> Iterator[Any]:
    """Build all shards, yielding each `ShardInfo` when it is finished, in any order.

    Cores that have no shard of their own become threads of the tokenizer; processes times threads never exceed cores.
    """
    cores = max_workers or usable_cores()
    workers = min(cores, len(jobs))
    context = multiprocessing.get_context("spawn")
    counters = context.Array("q", 3)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (counters, cores // workers))
    pending: set[Future[Any]] = set()
    try:
        pending = {pool.submit(_build, job) for job in jobs}
        workers_seen: set[Any] = set()
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            # the pool does not watch a worker that it started after it last looked, so look ourselves
            workers_seen.update(multiprocessing.active_children())
            if any(worker.exitcode for worker in workers_seen):
                raise BrokenProcessPool
            on_progress((counters[0], counters[1], counters[2]))
            for future in done:
                yield future.result()
    except BrokenProcessPool:
        raise UserError(
            "a tokenizing process died without an error, most likely killed for using too much memory; finished shards "
            "are kept. Run the same command again with a smaller data.num_preprocess_workers"
        ) from None
    finally:
        if pending:  # an error, or Ctrl-C: nobody wants the rest of the shards under way
            for child in multiprocessing.active_children():
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(counters: Any, threads: int) -> None:
    global _counters  # a worker is one process with one job at a time
    _counters = counters
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed has nobody to work for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _build(job: ShardJob) -> Any:
    def report(*increments: int) -> None:
        with _counters.get_lock():
            for index, increment in enumerate(increments):
                _counters[index] += increment

    return build_shard(job, report)
