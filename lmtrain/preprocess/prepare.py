"""Token caches of a run: finding them, building the missing shards in the background, and waiting until training can
start.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from lmtrain.data.cache_manifest import CacheManifest
from lmtrain.data.caches import Caches, needs_all
from lmtrain.data.config import DataConfig
from lmtrain.data.targets import FirstTargets
from lmtrain.preprocess.executor import Executor
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.recipe import Dropped, OtherCacheError
from lmtrain.preprocess.sources import has_text
from lmtrain.preprocess.split_cache import SplitCache, delete_cache, find_cache, has_cache, make_folder, split_folder
from lmtrain.preprocess.write_shard import ShardJob
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.progress import Progress, format_seconds
from lmtrain.runtime.signals import StoppedError, StopRequest
from lmtrain.runtime.storage import is_url, remove_temporaries

_WAIT_SECONDS = 0.05
_FEW = 3


@dataclass(frozen=True)
class SplitCaches(Caches):
    """All caches of a run by source name, finished or to be built."""

    train: Mapping[str, SplitCache]
    validation: Mapping[str, SplitCache]

    @property
    def all(self) -> list[SplitCache]:
        return [*self.train.values(), *self.validation.values()]


def find_caches(
    config: DataConfig,
    train: bool = True,
    validation: bool = True,
    dropped: Mapping[str, Dropped] | None = None,
    rebuild: bool = False,
) -> SplitCaches:
    """The requested splits of every source; `validation` only of sources that have validation text.

    `dropped`: training documents of a source to leave out. Raises `UserError` that names all caches of other data, or
    deletes these with `rebuild`.
    """
    require_text(config, "train" if train else "validation")
    others: list[OtherCacheError] = []
    caches = SplitCaches(
        _find_split(config, "train", dropped or {}, others) if train else {},
        _find_split(config, "validation", {}, others) if validation else {},
    )
    if others and rebuild:
        for other in others:
            log.warning(f"{other.problem}\n  deleted, to build it again")
            delete_cache(other.folder)
        return find_caches(config, train, validation, dropped)
    if others:
        raise UserError("\n".join([*(other.problem for other in others), OtherCacheError.ADVICE]))
    if not train and not caches.validation:
        raise UserError("data: no validation text")
    if shared := shared_text(caches):
        more = f" and {len(shared) - _FEW} more" if len(shared) > _FEW else ""
        log.warning(
            f"{', '.join(shared[:_FEW])}{more}: validation text is also training text (same size, start and end), "
            "so eval/loss does not measure generalization; remove it from train_urls"
        )
    return caches


def shared_text(caches: SplitCaches) -> list[str]:
    """Validation files that are also training files, under any name."""
    trained = {source["fingerprint"] for cache in caches.train.values() for source in cache.sources}
    apart = [cache for cache in caches.validation.values() if "validation_fraction" not in cache.recipe["documents"]]
    validation = (source for cache in apart for source in cache.sources)
    return list(dict.fromkeys(source["url"] for source in validation if source["fingerprint"] in trained))


def start_build(config: RunConfig, caches: SplitCaches, processes: Processes, background: bool = False) -> "Build":
    """Start to build the missing shards. The first process of a run builds, and the others follow. In the `background`
    of training, workers have a lower priority, unless it waits for them."""
    from lmtrain.preprocess.executor import LOCAL, choose_executor

    executor = LOCAL  # of finished shards, for which Ray need not be installed
    if not all(cache.complete for cache in caches.all):
        background = background and _reason_to_wait(config) is None
        executor = choose_executor(config.trainer.ray, config.data.num_preprocess_workers, processes, background)
    return Build(caches.all, executor, follows=not processes.is_first).start()


def wait(build: "Build", stop: StopRequest | None = None, enough: Callable[[], bool] = lambda: False) -> None:
    """Show the progress of a build until it has ended or `enough()` is true.

    Raises the error of a failed build, and `StoppedError` after a request to `stop`.
    """
    with Progress("preprocess", build.total_bytes, quiet=build.follows) as progress:
        while build.running and not enough():
            progress.update(build.done_bytes, build.text)
            if stop is not None and stop.requested:
                build.stop()
                raise StoppedError
            time.sleep(_WAIT_SECONDS)
    build.check()


def wait_for_enough(config: RunConfig, caches: SplitCaches, build: "Build") -> None:
    """Wait until training can start: validation caches, one batch (in a mixture, one sequence of each source), and a
    target token in each source.

    Raises the error of a failed build, and `UserError` for a source without targets.
    """
    first_targets = [
        FirstTargets(config.data, cache, config.model.seq_len)
        for name, cache in caches.train.items()
        if config.data.has_weight(name)
    ]
    if (reason := _reason_to_wait(config)) is not None:
        if any(not cache.complete for cache in caches.train.values()):
            log.info(f"waiting for the complete training cache: {reason}")
        wait(build)
        for source in first_targets:
            source.found()
        return

    sequences = 1 if config.data.configs is not None else max(config.trainer.batch_sizes.all)

    def enough() -> bool:
        least = sequences * config.model.seq_len
        train_ready = all(cache.complete or cache.shards.tokens > least for cache in caches.train.values())
        return (
            train_ready
            and all(cache.complete for cache in caches.validation.values())
            and all(source.found() for source in first_targets)
        )

    wait(build, enough=enough)
    for source in first_targets:  # a complete cache has not been waited for
        source.found()
    if build.running:
        log.info("training starts while the rest of the data is tokenized")


def _reason_to_wait(config: RunConfig) -> str | None:
    return needs_all(config.data, config.epoch, config.objective.needs_reference)


def require_text(config: DataConfig, split: str) -> None:
    """Raise `UserError` if a config has no text for `split`."""
    if not any(source.id is not None or source.urls(split) for source in config.sources().values()):
        raise UserError(
            f"data.{split}_urls: no text for {'training' if split == 'train' else 'validation'}; set it to your "
            "files, or set data.demo to a folder to try lmtrain"
        )


def _find_split(
    config: DataConfig, split: str, dropped: Mapping[str, Dropped], others: list[OtherCacheError]
) -> dict[str, SplitCache]:
    """The caches of a split; those of other data are added to `others`."""
    caches = {}
    for name, source in config.sources().items():
        # opening a dataset takes seconds, and is needed only once
        if has_cache(source, split) or has_text(source, split):
            if split == "validation" and source.urls("train") and not source.urls("validation"):
                log.info(f"{split_folder(source, split)}: not used, since the config has no validation text")
                continue
            prepare_demo(source)
            is_read = split == "validation" or config.has_weight(name)
            try:
                caches[name] = find_cache(source, split, is_read, dropped.get(name))
            except OtherCacheError as error:
                others.append(error)
    return caches


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
            make_folder(cache.folder)
        if self._caches:
            self._thread.start()
        return self

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
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
            if cache.manifest is None:
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
            if not cache.missing:  # so that an error of validation, which is built first, is not found after hours
                _log_skipped(cache.write_manifest())
                cache.release()  # a finished cache is not locked again, so a kill would leave the lock's file
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
