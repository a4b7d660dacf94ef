"""The token caches of a run: planning them, building what is missing, and waiting until there is enough."""

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
    """What is to be done for each source of each split, by the sources' names."""

    train: Mapping[str, CachePlan]
    validation: Mapping[str, CachePlan]

    @property
    def all(self) -> list[CachePlan]:
        return [*self.train.values(), *self.validation.values()]

    @property
    def caches(self) -> Caches:
        return Caches(train=_caches(self.train), validation=_caches(self.validation))


def plan_caches(config: DataConfig, train: bool = True, validation: bool = True) -> Plans:
    """Plans for the splits of every source that are wanted, `validation` only where there is text."""
    require_text(config, "train" if train else "validation")
    plans = Plans(_plan(config, "train") if train else {}, _plan(config, "validation") if validation else {})
    if not train and not plans.validation:
        raise UserError("data: there is no validation text in it")
    if shared := shared_text(plans):
        more = f" and {len(shared) - _SHOWN} more" if len(shared) > _SHOWN else ""
        log.warning(
            f"{', '.join(shared[:_SHOWN])}{more}: validation text that is training text too (the same size, beginning "
            "and end), so that eval/loss says little about new text; take it out of train_urls"
        )
    return plans


def shared_text(plans: Plans) -> list[str]:
    """The validation files that are among the training files too, under whatever name."""
    trained = {source["fingerprint"] for plan in plans.train.values() for source in plan.sources}
    found = (s["url"] for plan in plans.validation.values() for s in plan.sources if s["fingerprint"] in trained)
    return list(dict.fromkeys(found))


class Complete:
    """A `Build` where nothing is missing. Most starts have one: what builds caches is not even imported."""

    running = False
    follows = False
    text = ""
    done_bytes, total_bytes = 1, 1

    def check(self) -> None:
        """Nothing can fail."""

    def stop(self) -> None:
        """Nothing runs."""


def start_build(config: RunConfig, plans: Plans, processes: Processes, background: bool = False) -> "Build | Complete":
    """Begin to build what is missing. Of several processes the first builds, and the others follow."""
    if all(plan.manifest is not None for plan in plans.all):
        return Complete()
    from lmtrain.preprocess.build import Build
    from lmtrain.preprocess.executor import choose_executor

    if all(plan.complete for plan in plans.all):  # only a manifest is: Ray is not needed, nor has it to be installed
        executor = choose_executor(RayConfig(), None, ALONE)
    else:
        executor = choose_executor(config.trainer.ray, config.data.num_preprocess_workers, processes, background)
    return Build(plans.all, executor, follows=not processes.is_first).start()


def wait(build: "Build | Complete", stop: StopRequest, enough: Callable[[], bool] = lambda: False) -> None:
    """Show the progress of a build until it has ended, or there is `enough`.

    Raises what it failed with, and `StoppedError` once it is stopped.
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
    """Until training can begin: the validation caches, and a batch, or of a mixture a sequence of each source.

    Raises as `wait` does.
    """
    reason = needs_all(config.data, config.epoch)
    if reason is not None:
        if any(not plan.complete for plan in plans.train.values()):
            log.info(f"waiting for the data: {reason}")
        wait(build, stop)
        return

    sequences = 1 if config.data.configs is not None else max(config.trainer.batch_sizes.all)

    def enough() -> bool:
        least = sequences * config.model.seq_len
        begun = all(plan.complete or plan.shards.tokens > least for plan in plans.train.values())
        return begun and all(plan.complete for plan in plans.validation.values())

    wait(build, stop, enough)
    if build.running:
        log.info("training begins while the rest of the data is tokenized")


def require_text(config: DataConfig, split: str) -> None:
    """Raise `UserError` if a config, which may be without data, has no text for `split`."""
    if not any(source.id is not None or source.urls(split) for source in config.sources().values()):
        raise UserError(
            f"data.{split}_urls: no text for {'training' if split == 'train' else 'validation'}; name your files, "
            "or set data.demo to a folder to try lmtrain"
        )


def _plan(config: DataConfig, split: str) -> dict[str, CachePlan]:
    plans = {}
    for name, source in config.sources().items():
        # looking into a data set takes seconds, and is needed only once
        if has_cache(source, split) or has_text(source, split):
            if split == "validation" and source.urls("train") and not source.urls("validation"):
                log.info(f"{split_folder(source, split)}: not used, as the config names no validation text")
                continue
            prepare_demo(source)
            plans[name] = plan_cache(source, split)
    return plans


def _caches(plans: Mapping[str, CachePlan]) -> dict[str, Cache]:
    return {
        name: Cache(plan.folder, plan.recipe, plan.sources, plan.dtype, plan.shards) for name, plan in plans.items()
    }
