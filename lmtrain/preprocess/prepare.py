"""Token caches of a run: finding them, building the missing shards, and waiting until training can start."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmtrain.config.errors import UserError
from lmtrain.data.caches import Caches, needs_all
from lmtrain.data.config import DataConfig
from lmtrain.data.targets import FirstTargets
from lmtrain.preprocess.dropped import Dropped
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.sources import has_text
from lmtrain.preprocess.split_cache import SplitCache, find_cache, has_cache, split_folder
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import Processes
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import StoppedError, StopRequest

if TYPE_CHECKING:
    from lmtrain.preprocess.build import Build

_POLL_SECONDS = 0.05
_SHOWN = 3


@dataclass(frozen=True)
class SplitCaches(Caches):
    """All caches of a run by source name, finished or to be built."""

    train: Mapping[str, SplitCache]
    validation: Mapping[str, SplitCache]

    @property
    def all(self) -> list[SplitCache]:
        return [*self.train.values(), *self.validation.values()]


def find_caches(
    config: DataConfig, train: bool = True, validation: bool = True, dropped: Mapping[str, Dropped] | None = None
) -> SplitCaches:
    """The requested splits of every source; `validation` only of sources that have validation text.

    `dropped`: training documents of a source to leave out.
    """
    require_text(config, "train" if train else "validation")
    caches = SplitCaches(
        _find_split(config, "train", dropped or {}) if train else {},
        _find_split(config, "validation", {}) if validation else {},
    )
    if not train and not caches.validation:
        raise UserError("data: no validation text")
    if shared := shared_text(caches):
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        log.warning(
            f"{', '.join(shared[:_SHOWN])}{more}: validation text is also training text (same size, start and end), "
            "so eval/loss does not measure generalization; remove it from train_urls"
        )
    return caches


def shared_text(caches: SplitCaches) -> list[str]:
    """Validation files that are also training files, under any name."""
    trained = {source["fingerprint"] for cache in caches.train.values() for source in cache.sources}
    validation = (source for cache in caches.validation.values() for source in cache.sources)
    return list(dict.fromkeys(source["url"] for source in validation if source["fingerprint"] in trained))


def start_build(config: RunConfig, caches: SplitCaches, processes: Processes, background: bool = False) -> "Build":
    """Start to build the missing shards. The first process of a run builds, and the others follow."""
    from lmtrain.preprocess.build import Build
    from lmtrain.preprocess.executor import LOCAL, choose_executor

    executor = LOCAL  # of finished shards, for which Ray need not be installed
    if not all(cache.complete for cache in caches.all):
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
            time.sleep(_POLL_SECONDS)
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
    reason = needs_all(config.data, config.epoch, config.objective.needs_reference)
    if reason is not None:
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


def require_text(config: DataConfig, split: str) -> None:
    """Raise `UserError` if a config has no text for `split`."""
    if not any(source.id is not None or source.urls(split) for source in config.sources().values()):
        raise UserError(
            f"data.{split}_urls: no text for {'training' if split == 'train' else 'validation'}; set it to your "
            "files, or set data.demo to a folder to try lmtrain"
        )


def _find_split(config: DataConfig, split: str, dropped: Mapping[str, Dropped]) -> dict[str, SplitCache]:
    caches = {}
    for name, source in config.sources().items():
        # opening a dataset takes seconds, and is needed only once
        if has_cache(source, split) or has_text(source, split):
            if split == "validation" and source.urls("train") and not source.urls("validation"):
                log.info(f"{split_folder(source, split)}: not used, since the config has no validation text")
                continue
            prepare_demo(source)
            is_read = split == "validation" or config.has_weight(name)
            caches[name] = find_cache(source, split, is_read, dropped.get(name))
    return caches
