"""Executors of jobs, which build shards or check texts: this machine or a Ray cluster, with the same result."""

import ctypes
import errno
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from lmtrain.preprocess.sources import AnySource
from lmtrain.run.execution import RayConfig
from lmtrain.runtime.errors import RunError, UserError, counted
from lmtrain.runtime.logging import Processes
from lmtrain.runtime.machine import usable_cores
from lmtrain.runtime.signals import STOP_SIGNALS, StoppedError

# Number of counts of a job: documents, tokens, bytes of input as stored.
COUNTS = 3
# Called with increments of the counts.
Report = Callable[[int, int, int], None]


class Job(Protocol):
    """A job that depends on nothing but its fields, so that any process of any machine may run it."""

    @property
    def source(self) -> AnySource:
        """What it reads."""

    def run(self, report: Report) -> Any:
        """Do the work, and return its result, which can be pickled."""

    def counts(self, result: Any) -> tuple[int, int, int]:
        """The counts of a finished job."""

    def check(self, result: Any) -> None:
        """Raise `UserError` if what the job has written on another machine is not here."""


# Local executor: runs jobs in one process per core. Workers are spawned, so that they import no JAX, and without the
# program that called lmtrain, whose main code need not be guarded by `if __name__ == "__main__":`.

_POLL_SECONDS = 0.2
# Between the end of a process and its exit code, at most.
_EXIT_SECONDS = 10.0
_KEPT = "finished shards are kept"

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
    workers_seen: set[Any] = set()
    finished = False
    with _starting():
        pool = ProcessPoolExecutor(workers, context, _start_worker, (counters, cores // workers, background))
    pending: set[Future[Any]] = set()
    try:
        with _starting():
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
    except MemoryError:
        raise _out_of_memory("ran out of memory") from None
    except BrokenProcessPool:
        raise _ended(workers_seen) from None
    finally:
        if not finished:  # an error or a request to stop: unfinished shards are discarded
            for child in workers_seen | set((pool._processes or {}).values()):
                child.kill()  # they ignore the signals that the pool would send
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _starting() -> Iterator[None]:
    """Context in which processes are started: they inherit that signals are blocked (those to the entire process group
    are for the parent; `multiprocessing` also starts a process that SIGHUP would end), and do not import the program.
    """
    main = sys.modules["__main__"]
    spec, file = main.__spec__, main.__dict__.pop("__file__", None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    main.__spec__ = None  # without it and `__file__`, multiprocessing finds no program to import
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(workers: Iterable[Any]) -> UserError | RunError:
    """The error of workers of which one has ended, or is about to: its files are closed before its exit code exists."""
    deadline, codes = time.monotonic() + _EXIT_SECONDS, list[int]()
    while not codes and time.monotonic() < deadline:
        time.sleep(_EXIT_SECONDS / 1000)
        codes = [code for worker in workers if (code := worker.exitcode) is not None]
    code = next(filter(None, codes), 0)
    if code == -signal.SIGKILL:
        return _out_of_memory("was killed (SIGKILL), most likely for using too much memory")
    how = f"exited with code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    return RunError(f"a tokenizer process {how}; its messages are on stderr, above. {_KEPT.capitalize()}")


def _out_of_memory(what: str) -> UserError:
    return UserError(
        f"a tokenizer process {what}; {_KEPT}. Run the same command again with a smaller data.num_preprocess_workers"
    )


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
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(number: int, job: Job) -> Any:
    def report(*increments: int) -> None:
        _counters[number] += increments

    return job.run(report)


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
            f"{why} preprocesses on Ray, which is not installed: pip install 'ray[default]', or build the cache "
            "first with `lmtrain preprocess` on one machine"
        )
