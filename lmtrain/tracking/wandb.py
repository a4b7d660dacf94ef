"""Weights & Biases. The only file that knows wandb."""

import functools
import netrc
import os
from collections.abc import Mapping
from typing import Any

from lmtrain.runtime.logging import log
from lmtrain.tracking.config import WandbConfig

# Less than a run waits for its trackers at its end, so that one that is over sooner is offline by then.
_INIT_SECONDS = 20.0


class WandbTracker:
    """Continues the W&B run of the same id after a restart. Offline, with a notice, when there is no key."""

    def __init__(self, config: WandbConfig, run: str, log_dir: str):
        import wandb  # slow to import: only the tracker's thread waits for it

        mode = config.mode
        if mode is None and not _has_key():
            mode = "offline"
            log.info(f"W&B: no API key found, logging offline under {log_dir}; send it later with `wandb sync`")
        start = functools.partial(
            wandb.init,
            entity=config.entity,
            project=config.project,
            name=config.name or run,
            tags=config.tags,
            id=config.id or run,
            group=config.group,
            dir=log_dir,
            resume=config.resume,
            settings=wandb.Settings(silent=True, init_timeout=_INIT_SECONDS),
        )
        try:
            self._run = start(mode=mode)
        except wandb.errors.CommError as error:
            reason = str(error).splitlines()[0]
            log.warning(f"W&B does not answer ({reason}): logging offline under {log_dir}; send it later: `wandb sync`")
            wandb.teardown()  # what still tries to reach it holds the run's id
            self._run = start(mode="offline")

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def finish(self) -> None:
        self._run.finish()


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False
