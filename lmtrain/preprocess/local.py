"""Local executor: runs jobs in one process per core. Workers are spawned, so that they import no JAX."""

import ctypes
import errno
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.preprocess.job import COUNTS, Job
from lmtrain.runtime.machine import usable_cores
from lmtrain.runtime.signals import STOP_SIGNALS, StoppedError

_POLL_SECONDS = 0.2
_DIED = "died without an error, most likely killed for using too much memory"

# In a worker: the counts of each job, shared with the parent.
_counters: Any = None


def run_locally(
    jobs: Sequence[Job],
    on_counts: Callable[[np.ndarray], None],
    stopped: Callable[[], bool],
    max_workers: int | None = None,
    background: bool = False,
) -> Iterator[tuple[int, Any]]:
    """Run all jobs, yielding (number of the job, result) when one is finished, in any order.

    With fewer jobs than cores, the tokenizer uses threads; processes times threads never exceed the cores. Raises
    `UserError` if processes die, memory is exhausted, or the limit of open files is reached.
    """
    try:
        yield from _run_jobs(jobs, on_counts, stopped, max_workers, background)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise UserError(
            f"too many open files for the tokenizer processes: the limit is {limit:,}; raise it with `ulimit -n 4096`, "
            "or set a smaller data.num_preprocess_workers; finished shards are kept"
        ) from None


def _run_jobs(
    jobs: Sequence[Job],
    on_counts: Callable[[np.ndarray], None],
    stopped: Callable[[], bool],
    max_workers: int | None,
    background: bool,
) -> Iterator[tuple[int, Any]]:
    cores = max_workers or usable_cores()
    workers = min(cores, len(jobs))
    context = multiprocessing.get_context("spawn")
    # no lock: each row has one writer, and readers only display it
    counters = context.RawArray(ctypes.c_int64, COUNTS * len(jobs))
    counts = np.frombuffer(counters, np.int64).reshape(-1, COUNTS)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (counters, cores // workers, background))
    pending: set[Future[Any]] = set()
    workers_seen: set[Any] = set()
    finished = False
    try:
        numbers = {pool.submit(_run, number, job): number for number, job in enumerate(jobs)}
        pending = set(numbers)
        while pending:
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            # the pool does not notice the death of workers started after its last check, so check here
            workers_seen.update((pool._processes or {}).values())
            if any(worker.exitcode for worker in workers_seen):
                raise BrokenProcessPool
            on_counts(counts)
            for future in done:
                yield numbers[future], future.result()
            if stopped() and pending:
                raise StoppedError
        finished = True
    except (BrokenProcessPool, MemoryError) as error:
        what = "ran out of memory" if isinstance(error, MemoryError) else _DIED
        raise UserError(
            f"a tokenizer process {what}; finished shards are kept. Run the same command again with a smaller "
            "data.num_preprocess_workers"
        ) from None
    finally:
        if not finished:  # an error or a request to stop: unfinished shards are discarded
            for child in workers_seen | set((pool._processes or {}).values()):
                child.kill()  # they ignore the signals that the pool would send
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(counters: Any, threads: int, background: bool) -> None:
    global _counters  # a worker is one process with one job at a time
    _counters = np.frombuffer(counters, np.int64).reshape(-1, COUNTS)
    for number in STOP_SIGNALS:  # sent to the entire process group; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    if background:
        os.nice(10)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(number: int, job: Job) -> Any:
    def report(*increments: int) -> None:
        _counters[number] += increments

    return job.run(report)
