"""Whether a checkpoint belongs to a run."""

from collections.abc import Mapping
from typing import Any

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.config.compare import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.runtime.logging import log


def check_same_run(checkpoint: Checkpoint, run_info: Mapping[str, Any]) -> None:
    """Raise `UserError` if model, tokenizer, data or seed differ; say what else has changed.

    Steps, intervals, trackers, learning rate, mesh and accumulation may change from one start to the next.
    """
    saved = checkpoint.read_run_info()
    differences = describe_differences(saved["identity"], run_info["identity"], "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(
            f"{checkpoint.path} is of another run\n{report}\n  give this run another trainer.id, or restore the config"
        )
    for part in ("config", "machine", "versions"):
        for line in describe_differences(saved[part], run_info[part], "the checkpoint", "this run"):
            log.info(f"changed since {checkpoint.path}: {line}")
