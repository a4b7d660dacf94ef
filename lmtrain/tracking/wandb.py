"""Weights & Biases. The only file that knows wandb."""

import netrc
import os
from collections.abc import Mapping
from typing import Any

from lmtrain.runtime.logging import log
from lmtrain.tracking.config import WandbConfig


class WandbTracker:
    """Continues the W&B run of the same id after a restart. Offline, with a notice, when there is no key."""

    def __init__(self, config: WandbConfig, run: str, log_dir: str):
        import wandb  # slow to import: only the tracker's thread waits for it

        mode = config.mode
        if mode is None and not _has_key():
            mode = "offline"
            log.info(f"W&B: no API key found, logging offline under {log_dir}; send it later with `wandb sync`")
        self._run = wandb.init(
            entity=config.entity,
            project=config.project,
            name=config.name or run,
            tags=config.tags,
            id=config.id or run,
            group=config.group,
            mode=mode,
            dir=log_dir,
            resume=config.resume,
            settings=wandb.Settings(silent=True),
        )

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
