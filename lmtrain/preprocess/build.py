"""Cache builds in a background thread, so that training can start before they are complete."""

import threading
import time
from contextlib import nullcontext

import numpy as np

from lmtrain.data.cache_manifest import Manifest
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.executor import Executor, choose_executor
from lmtrain.preprocess.plan import CachePlan, plan_cache
from lmtrain.preprocess.write_shard import COUNTS, ShardJob
from lmtrain.runtime.atomic_files import remove_temporaries
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE
from lmtrain.runtime.progress import format_seconds
from lmtrain.runtime.signals import StoppedError
from lmtrain.runtime.storage import is_url

_POLL_SECONDS = 0.5
_SHARDS_SHOWN = 4
_SHARED_SECONDS = 60


class Build:
    """Background build of the missing shards of caches. With `follows` it only waits for another process to build.

    Call `start`, poll `running`, and call `stop` at the end. `check` raises the error of a failed build; readers of
    the plans' shards get the same error.
    """

    def __init__(self, plans: list[CachePlan], executor: Executor, follows: bool = False):
        self.done_bytes = 0
        self.text = "starting"
        self._plans = [plan for plan in plans if not plan.complete or plan.manifest is None]
        self.total_bytes = max(1, sum(job.source.bytes for plan in self._plans for job in plan.missing))
        self._executor = executor
        self.follows = follows
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="build caches", daemon=True)

    def start(self) -> "Build":
        for plan in self._plans:
            plan.make_folder()
        self._thread.start()
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a failed build."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the build. Finished shards are kept, and the next build resumes from them."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._executor.helping() if self.follows and self._plans else nullcontext():
                self._until_complete()
        except BaseException as error:
            self._error = error
            for plan in self._plans:
                if not plan.complete:
                    plan.shards.fail(error)

    def _until_complete(self) -> None:
        """Build the caches that no other process is building, and read the shards of the others."""
        waiting = list(self._plans)
        logged, started = False, time.monotonic()
        while waiting and not self._stopped.is_set():
            mine = [] if self.follows else [plan for plan in waiting if plan.acquire()]
            try:
                for plan in waiting:
                    plan.find_finished()
                if mine:
                    self._build(mine)
            finally:
                for plan in mine:
                    plan.release()
            waiting = [plan for plan in waiting if plan not in mine and not plan.complete]
            if waiting:
                if not self.follows and not logged:
                    log.info(f"{waiting[0].folder}: {waiting[0].holder()} is building it; using its shards")
                if self.follows and not logged and time.monotonic() - started > _SHARED_SECONDS:
                    log.warning(
                        f"{waiting[0].folder}: waiting for process 0 to build it; data.cache_dir must be a folder that "
                        "all hosts share, or a URL"
                    )
                logged = not self.follows or time.monotonic() - started > _SHARED_SECONDS
                self.text = "built by another process"
                self._stopped.wait(_POLL_SECONDS)
        if waiting:
            raise StoppedError

    def _build(self, plans: list[CachePlan]) -> None:
        work = _interleave(plans)
        if work:
            try:
                self._build_shards(work)
            finally:  # a successful build may also have lost a worker
                for plan in plans:
                    if not is_url(plan.folder):
                        remove_temporaries(plan.folder)
        for plan in plans:
            _log_skipped(plan.write_manifest())

    def _build_shards(self, work: list[tuple[CachePlan, int, ShardJob]]) -> None:
        began = time.monotonic()
        jobs = [job for _, _, job in work]
        done: set[int] = set()
        first_seen: dict[int, float] = {}
        totals = np.zeros(COUNTS, np.int64)

        def on_counts(counts: np.ndarray) -> None:
            nonlocal totals
            totals = counts.sum(axis=0)
            now = time.monotonic() - began
            for number in np.flatnonzero(counts[:, 1]).tolist():
                first_seen.setdefault(number, now)
            self.done_bytes = int(totals[2])
            self.text = _describe(jobs, counts, first_seen, done, now)

        existing = sum(len(plan.jobs) for plan in {id(plan): plan for plan, _, _ in work}.values()) - len(work)
        if existing:
            log.info(f"preprocess: {existing} of {existing + len(work)} shards are finished, resuming")
        log.info(f"preprocess: {len(work)} shards to build, {self._executor.label}")
        for number, info in self._executor.run(jobs, on_counts, self._stopped.is_set):
            plan, index, _ = work[number]
            plan.add(index, info)
            done.add(number)
        seconds = time.monotonic() - began
        log.info(
            f"preprocess: {totals[0]:,} documents, {totals[1]:,} tokens in {len(work)} shards, "
            f"{format_seconds(seconds)}, {_speed(totals, seconds)}"
        )


def build_cache(config: DataConfig, split: str, ray: RayConfig | None = None) -> Manifest:
    """Build the missing shards of one split and return the manifest of the finished cache."""
    plan = plan_cache(config, split)
    if plan.manifest is None:
        executor = choose_executor(ray or RayConfig(), config.num_preprocess_workers, ALONE)
        build = Build([plan], executor).start()
        while build.running:
            time.sleep(0.02)
        build.check()
    assert plan.manifest is not None
    return plan.manifest


def _interleave(plans: list[CachePlan]) -> list[tuple[CachePlan, int, ShardJob]]:
    """All missing shards with their plan and index, in the order in which training needs them.

    Validation comes first, then the first shards of all sources before their later ones.
    """
    work = [
        (plan.split == "train", index, number, plan, job)
        for number, plan in enumerate(plans)
        for index, job in enumerate(plan.jobs)
        if job in plan.missing
    ]
    work.sort(key=lambda entry: entry[:3])
    return [(plan, index, job) for _, index, _, plan, job in work]


def _describe(jobs: list[ShardJob], counts: np.ndarray, began: dict[int, float], done: set[int], now: float) -> str:
    """Progress of all jobs, then of some running ones. `began` is the time at which each was first active."""
    totals = counts.sum(axis=0)
    documents, tokens, read, _ = totals.tolist()
    total = sum(job.source.bytes for job in jobs)
    text = (
        f"{100 * read // max(total, 1)}%, {len(done)}/{len(jobs)} shards, {documents:,} documents, {tokens:,} tokens, "
        f"{_speed(totals, now)}"
    )
    under_way = [number for number in began if number not in done]
    shown = [_describe_shard(jobs[n], int(counts[n, 2]), now - began[n]) for n in under_way[:_SHARDS_SHOWN]]
    return text + (f" ({'; '.join(shown)})" if shown else "")


def _speed(totals: np.ndarray, seconds: float) -> str:
    """Tokens per second, and MB of uncompressed text per second; token ids do not count as text."""
    _, tokens, _, text = (total / max(seconds, 1e-9) for total in totals.tolist())
    return f"{tokens:,.0f} tokens/s" + (f", {text / 1e6:.1f} MB/s of text" if text else "")


def _describe_shard(job: ShardJob, read: int, seconds: float) -> str:
    name = job.path.rpartition("/")[2].partition("-of-")[0]
    size = max(job.source.bytes, 1)
    left = f", {format_seconds(seconds * (size - read) / read)} left" if 0 < read < size and seconds > 1 else ""
    return f"{name} {100 * read // size}%{left}"


def _log_skipped(manifest: Manifest) -> None:
    for warning in [warning for shard in manifest.shards for warning in shard.warnings]:
        log.warning(f"preprocess {manifest.split}: {warning}")
    if manifest.skipped:
        records = [record for shard in manifest.shards for record in shard.bad_records]
        more = [f"and {manifest.skipped - len(records):,} more"] if manifest.skipped > len(records) else []
        report = "\n".join(f"  {line}" for line in [*records[:20], *more])
        log.warning(f"preprocess {manifest.split}: skipped {manifest.skipped:,} bad records\n{report}")
