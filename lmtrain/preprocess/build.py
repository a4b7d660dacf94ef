"""Cache builds in a background thread, so that training can start before they are complete."""

import threading
import time
from contextlib import nullcontext

import numpy as np

from lmtrain.config.counts import counted
from lmtrain.data.cache_manifest import CacheManifest
from lmtrain.preprocess.executor import Executor
from lmtrain.preprocess.split_cache import SplitCache
from lmtrain.preprocess.write_shard import ShardJob
from lmtrain.runtime.atomic_files import remove_temporaries
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import format_seconds
from lmtrain.runtime.signals import StoppedError
from lmtrain.runtime.storage import is_url

_POLL_SECONDS = 0.5
_SHARED_SECONDS = 60
# Warnings and bad records that are listed.
_SHOWN = 20


class Build:
    """Background build of the missing shards of caches. With `follows` it only waits for another process to build.

    Call `start`, poll `running`, and call `stop` at the end. `check` raises the error of a failed build; readers of
    the caches' shards get the same error.
    """

    def __init__(self, caches: list[SplitCache], executor: Executor, follows: bool = False):
        self.done_bytes = 0
        self.text = "starting"
        self._caches = [cache for cache in caches if not cache.complete or cache.manifest is None]
        self._finished = [cache for cache in caches if cache not in self._caches]
        self.total_bytes = max(1, sum(job.source.bytes for cache in self._caches for job in cache.missing.values()))
        self._executor = executor
        self.follows = follows
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="build caches", daemon=True)

    def start(self) -> "Build":
        for cache in self._finished if not self.follows else []:
            cache.save_times()
        for cache in self._caches:
            cache.make_folder()
        if self._caches:
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
            with self._executor.helping() if self.follows else nullcontext():
                self._until_complete()
        except BaseException as error:
            self._error = error
            for cache in self._caches:
                if not cache.complete:
                    cache.shards.fail(error)

    def _until_complete(self) -> None:
        """Build the caches that no other process is building, and read the shards of the others."""
        waiting = list(self._caches)
        logged, started = False, time.monotonic()
        while waiting and not self._stopped.is_set():
            mine = [] if self.follows else [cache for cache in waiting if cache.acquire()]
            try:
                for cache in waiting:
                    cache.find_finished()
                if mine:
                    self._build(mine)
            finally:
                for cache in mine:
                    cache.release()
            waiting = [cache for cache in waiting if cache not in mine and not cache.complete]
            if waiting:
                if not logged:
                    logged = self._log_waiting(waiting[0], time.monotonic() - started)
                self.text = "built by another process"
                self._stopped.wait(_POLL_SECONDS)
        if waiting:
            raise StoppedError

    def _log_waiting(self, cache: SplitCache, seconds: float) -> bool:
        """Log that another process builds a cache; a follower only after some time. Returns whether it has logged."""
        if not self.follows:
            log.info(f"{cache.folder}: {cache.holder()} is building it; using its shards")
        elif seconds > _SHARED_SECONDS:
            log.warning(
                f"{cache.folder}: waiting for process 0 to build it; data.cache_dir must be a folder that all hosts "
                "share, or a URL"
            )
        return not self.follows or seconds > _SHARED_SECONDS

    def _build(self, caches: list[SplitCache]) -> None:
        missing = _interleave(caches)
        if missing:
            try:
                self._build_shards(missing)
            finally:  # a successful build may also have lost a worker
                for cache in caches:
                    if not is_url(cache.folder):
                        remove_temporaries(cache.folder)
        for cache in caches:
            _log_skipped(cache.write_manifest())

    def _build_shards(self, missing: list[tuple[SplitCache, int, ShardJob]]) -> None:
        began = time.monotonic()
        done, count = 0, counted(len(missing), "shard")
        summary = ""

        def on_counts(counts: np.ndarray) -> None:
            nonlocal summary
            documents, tokens, self.done_bytes = counts.sum(axis=0).tolist()
            seconds = max(time.monotonic() - began, 1e-9)
            speed = f"{tokens / seconds:,.0f} tokens/s"
            summary = f"{counted(documents, 'document')}, {tokens:,} tokens"
            self.text = f"{100 * self.done_bytes // self.total_bytes}%, {done}/{count}, {summary}, {speed}"
            summary += f" in {count}, {format_seconds(seconds)}, {speed}"

        existing = sum(len(cache.jobs) for cache in {cache for cache, _, _ in missing}) - len(missing)
        if existing:
            log.info(f"preprocess: {existing} of {counted(existing + len(missing), 'shard')} finished, resuming")
        log.info(f"preprocess: {count} to build, {self._executor.label}")
        jobs = [job for _, _, job in missing]
        for number, info in self._executor.run(jobs, on_counts, self._stopped.is_set):
            cache, index, _ = missing[number]
            cache.add(index, info)
            done += 1
        log.info(f"preprocess: {summary}")


def _interleave(caches: list[SplitCache]) -> list[tuple[SplitCache, int, ShardJob]]:
    """All missing shards with their cache and index, in the order in which training needs them.

    Validation comes first, then the first shards of all sources before their later ones.
    """
    missing = [(cache, index, job) for cache in caches for index, job in cache.missing.items()]
    return sorted(missing, key=lambda entry: (entry[0].split == "train", entry[1]))


def _log_skipped(manifest: CacheManifest) -> None:
    warnings = [warning for shard in manifest.shards for warning in shard.warnings]
    for warning in warnings[:_SHOWN]:
        log.warning(f"preprocess {manifest.split}: {warning}")
    if len(warnings) > _SHOWN:
        log.warning(f"preprocess {manifest.split}: and {len(warnings) - _SHOWN:,} more such warnings of other shards")
    if manifest.skipped:
        records = [record for shard in manifest.shards for record in shard.bad_records]
        more = [f"and {manifest.skipped - len(records):,} more"] if manifest.skipped > len(records) else []
        report = "\n".join(f"  {line}" for line in [*records[:_SHOWN], *more])
        log.warning(f"preprocess {manifest.split}: skipped {counted(manifest.skipped, 'bad record')}\n{report}")
