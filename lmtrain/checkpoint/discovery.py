"""Finding checkpoints on disk. A step folder is there only when it is complete: unfinished ones have other names."""

import os
import re
from dataclasses import dataclass
from typing import Any

from lmtrain.checkpoint.policies import Kind
from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import read_json

_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: str

    def read_run_info(self) -> dict[str, Any]:
        """What was saved beside the arrays: kind, identity, config, versions."""
        value: dict[str, Any] = read_json(os.path.join(self.path, "run", "metadata"))
        return value

    @property
    def kind(self) -> Kind:
        return Kind(self.read_run_info()["kind"])


def step_folder(run_folder: str, step: int) -> str:
    return os.path.join(run_folder, f"step-{step}")


def list_checkpoints(run_folder: str) -> list[Checkpoint]:
    """The complete checkpoints directly in `run_folder`, oldest first; empty if the folder does not exist."""
    if not os.path.isdir(run_folder):
        return []
    matches = [(_STEP.fullmatch(name), name) for name in os.listdir(run_folder)]
    steps = [Checkpoint(int(match[1]), os.path.join(run_folder, name)) for match, name in matches if match]
    found = [checkpoint for checkpoint in steps if os.path.isdir(checkpoint.path)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def find_checkpoint(path: str) -> Checkpoint:
    """The checkpoint at `path`, or the newest (by step) in the run folder or any parent that `path` names.

    Raises `UserError` if there is none.
    """
    path = os.path.expanduser(path).rstrip("/") or "/"
    match = _STEP.fullmatch(os.path.basename(path))
    if match and os.path.isdir(path):
        return Checkpoint(int(match[1]), path)
    found = list_checkpoints(path)
    for folder, subfolders, _ in os.walk(path):
        subfolders[:] = [name for name in subfolders if not name.startswith("step-")]
        for name in subfolders:
            found += list_checkpoints(os.path.join(folder, name))
    if not found:
        reason = "there is no complete checkpoint in it" if os.path.isdir(path) else "no such folder"
        raise UserError(f"checkpoint {path}: {reason}; `lmtrain train` saves them")
    return max(found, key=lambda checkpoint: checkpoint.step)
