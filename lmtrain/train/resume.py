"""Whether a checkpoint belongs to a run."""

from collections.abc import Mapping
from typing import Any

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.config.compare import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.run_config import RunConfig, identity
from lmtrain.runtime.logging import log

# Where a run began is of no use once it has begun.
_BEGINNINGS = ("initialize_from", "initialize_from_checkpoint_path", "initialize_from_hf")


def run_identity(config: RunConfig, tokenizer: Mapping[str, Any], data_tokens: str) -> dict[str, Any]:
    """What has to stay the same from one start of a run to the next.

    Other learning rates and decays continue the same state; another optimizer cannot.
    """
    other = {"optimizer": {"type": config.optimizer.type}, "tokenizer": dict(tokenizer), "data_tokens": data_tokens}
    return identity(config) | other


def check_identity(checkpoint: Checkpoint, now: Mapping[str, Any]) -> None:
    """Raise `UserError` if model, tokenizer, data or seed differ."""
    saved = checkpoint.read_run_info()["identity"]
    ours, theirs = ({k: v for k, v in same.items() if k not in _BEGINNINGS} for same in (now, saved))
    differences = describe_differences(theirs, ours, "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(
            f"{checkpoint.path} is of another run\n{report}\n  give this run another trainer.id, or restore the config"
        )


def check_same_run(checkpoint: Checkpoint, run_info: Mapping[str, Any]) -> None:
    """Raise `UserError` if model, tokenizer, data or seed differ; say what else has changed.

    Steps, intervals, trackers, learning rate, mesh and accumulation may change from one start to the next.
    """
    check_identity(checkpoint, run_info["identity"])
    saved = checkpoint.read_run_info()
    for part in ("config", "machine", "versions"):
        for line in describe_differences(saved[part], run_info[part], "the checkpoint", "this run"):
            log.info(f"changed since {checkpoint.path}: {line}")
