"""Token caches of a run: planning, building the missing shards, and waiting until training can start."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmtrain.config.errors import UserError
from lmtrain.data.caches import Cache, Caches, needs_all
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.plan import CachePlan, has_cache, plan_cache, split_folder
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.sources import has_text
from lmtrain.run.config import RunConfig
from lmtrain.runtime.config import RayConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.signals import StoppedError, StopRequest

if TYPE_CHECKING:
    from lmtrain.preprocess.build import Build

_POLL_SECONDS = 0.05
_SHOWN = 3


@dataclass(frozen=True)
class Plans:
    """Cache plans of both splits by source name."""

    train: Mapping[str, CachePlan]
    validation: Mapping[str, CachePlan]

    @property
    def all(self) -> list[CachePlan]:
        return [*self.train.values(), *self.validation.values()]

    @property
    def caches(self) -> Caches:
        return Caches(train=_caches(self.train), validation=_caches(self.validation))


def plan_caches(config: DataConfig, train: bool = True, validation: bool = True) -> Plans:
    """Plan the requested splits of every source; `validation` only for sources that have validation text."""
    require_text(config, "train" if train else "validation")
    plans = Plans(_plan(config, "train") if train else {}, _plan(config, "validation") if validation else {})
    if not train and not plans.validation:
        raise UserError("data: no validation text")
    if shared := shared_text(plans):
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        log.warning(
            f"{', '.join(shared[:_SHOWN])}{more}: validation text is also training text (same size, start and end), "
            "so eval/loss does not measure generalization; remove it from train_urls"
        )
    return plans


def shared_text(plans: Plans) -> list[str]:
    """Validation files that are also training files, under any name."""
    trained = {source["fingerprint"] for plan in plans.train.values() for source in plan.sources}
    found = (s["url"] for plan in plans.validation.values() for s in plan.sources if s["fingerprint"] in trained)
    return list(dict.fromkeys(found))


class Complete:
    """A `Build` with nothing to do. Used at most starts, so that the build code is not imported."""

    running = False
    follows = False
    text = ""
    done_bytes, total_bytes = 1, 1

    def check(self) -> None:
        """Nothing can fail."""

    def stop(self) -> None:
        """Nothing runs."""


def start_build(config: RunConfig, plans: Plans, processes: Processes, background: bool = False) -> "Build | Complete":
    """Start to build the missing shards. The first process of a run builds, and the others follow."""
    if all(plan.manifest is not None for plan in plans.all):
        return Complete()
    from lmtrain.preprocess.build import Build
    from lmtrain.preprocess.executor import choose_executor

    if all(
        plan.complete for plan in plans.all
    ):  # only a manifest is missing: Ray is not needed and need not be installed
        executor = choose_executor(RayConfig(), None, ALONE)
    else:
        executor = choose_executor(config.trainer.ray, config.data.num_preprocess_workers, processes, background)
    return Build(plans.all, executor, follows=not processes.is_first).start()


def wait(build: "Build | Complete", stop: StopRequest, enough: Callable[[], bool] = lambda: False) -> None:
    """Show the progress of a build until it has ended or `enough()` is true.

    Raises the error of a failed build, and `StoppedError` after a request to stop.
    """
    with Progress("preprocess", build.total_bytes, quiet=build.follows) as progress:
        while build.running and not enough():
            progress.update(build.done_bytes, build.text)
            if stop.requested:
                build.stop()
                raise StoppedError
            time.sleep(_POLL_SECONDS)
    build.check()


def wait_for_enough(config: RunConfig, plans: Plans, build: "Build | Complete", stop: StopRequest) -> None:
    """Wait until training can start: validation caches, and one batch (in a mixture, one sequence of each source).

    Raises the same errors as `wait`.
    """
    reason = needs_all(config.data, config.epoch)
    if reason is not None:
        if any(not plan.complete for plan in plans.train.values()):
            log.info(f"waiting for the complete training cache: {reason}")
        wait(build, stop)
        return

    sequences = 1 if config.data.configs is not None else max(config.trainer.batch_sizes.all)

    def enough() -> bool:
        least = sequences * config.model.seq_len
        train_ready = all(plan.complete or plan.shards.tokens > least for plan in plans.train.values())
        return train_ready and all(plan.complete for plan in plans.validation.values())

    wait(build, stop, enough)
    if build.running:
        log.info("training starts while the rest of the data is tokenized")


def require_text(config: DataConfig, split: str) -> None:
    """Raise `UserError` if a config has no text for `split`."""
    if not any(source.id is not None or source.urls(split) for source in config.sources().values()):
        raise UserError(
            f"data.{split}_urls: no text for {'training' if split == 'train' else 'validation'}; set it to your "
            "files, or set data.demo to a folder to try lmtrain"
        )


def _plan(config: DataConfig, split: str) -> dict[str, CachePlan]:
    plans = {}
    for name, source in config.sources().items():
        # opening a dataset takes seconds, and is needed only once
        if has_cache(source, split) or has_text(source, split):
            if split == "validation" and source.urls("train") and not source.urls("validation"):
                log.info(f"{split_folder(source, split)}: not used, since the config has no validation text")
                continue
            prepare_demo(source)
            plans[name] = plan_cache(source, split)
    return plans


def _caches(plans: Mapping[str, CachePlan]) -> dict[str, Cache]:
    return {
        name: Cache(plan.folder, plan.recipe, plan.sources, plan.dtype, plan.shards, plan.too_long)
        for name, plan in plans.items()
    }
