"""Discovery of checkpoints at paths and URLs. A step folder is a checkpoint once it has its manifest.

A run's folder may also contain `step-<N>.partial`, a marker that the folder `step-<N>` is being written or deleted, and
`damaged-step-<N>`, a corrupt checkpoint that was set aside.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.checkpoint.manifest import NAME, DamagedError, Manifest, read_manifest
from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import is_url, join, list_files, list_names, read_json

RUN_INFO = "run.json"
_STEP = re.compile(r"step-(0|[1-9]\d*)")
_PARTIAL = re.compile(_STEP.pattern + r"\.partial")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint, at a path or URL."""

    step: int
    path: str

    def read_run_info(self) -> dict[str, Any]:
        """What was saved with the arrays: identity, config, machine, versions. Raises `DamagedError`."""
        try:
            value = read_json(join(self.path, RUN_INFO))
        except UserError:  # a store that does not respond does not mean a corrupt checkpoint
            raise
        except (FileNotFoundError, ValueError):
            value = None
        if not isinstance(value, dict):
            raise DamagedError(f"{self.path}: {RUN_INFO} is missing or corrupt")
        return value

    def read_manifest(self) -> Manifest:
        """The checkpoint's manifest. Raises `DamagedError` if it is corrupt."""
        return read_manifest(self.path)


def step_folder(run_folder: str, step: int) -> str:
    """The folder of the checkpoint after `step` updates."""
    return join(run_folder, f"step-{step}")


def partial_marker(run_folder: str, step: int) -> str:
    """Path of the file that marks the folder of `step` as being written or deleted, and so to be ignored."""
    return join(run_folder, f"step-{step}.partial")


def list_checkpoints(run_folder: str) -> list[Checkpoint]:
    """The complete checkpoints directly in `run_folder`, oldest first; empty if the folder does not exist."""
    return [found for found in _complete(run_folder) if os.path.dirname(found.path) == join(run_folder).rstrip("/")]


def list_step_folders(run_folder: str) -> list[int]:
    """The steps that have a folder, complete or not."""
    return sorted(int(match[1]) for name in list_names(run_folder) if (match := _STEP.fullmatch(name)))


def list_partial(run_folder: str) -> list[int]:
    """The steps whose folders were being written or deleted when the process ended."""
    return sorted(int(match[1]) for name in list_names(run_folder) if (match := _PARTIAL.fullmatch(name)))


def list_set_aside(run_folder: str) -> list[str]:
    """Paths of the corrupt checkpoints that were set aside."""
    return [join(run_folder, name) for name in list_names(run_folder) if name.startswith("damaged-step-")]


def list_without_manifest(run_folder: str) -> list[str]:
    """Paths of corrupt step folders: neither complete nor being written or deleted."""
    fine = {checkpoint.step for checkpoint in list_checkpoints(run_folder)} | set(list_partial(run_folder))
    return [step_folder(run_folder, step) for step in list_step_folders(run_folder) if step not in fine]


def find_checkpoints(path: str) -> list[Checkpoint]:
    """The checkpoint at `path`, or all checkpoints below it (a run folder or any parent), sorted by step.

    Raises `UserError` if none is found.
    """
    if not path:
        raise UserError("checkpoint '': expected a path")
    path = join(path).rstrip("/") or "/"
    match = _STEP.fullmatch(os.path.basename(path))
    if match and NAME in list_names(path):
        return [Checkpoint(int(match[1]), path)]
    found = _complete(path, recursive=True)
    if not found:
        there = bool(list_names(path)) or os.path.isdir(path)
        reason = "there is no complete checkpoint in it" if there else "no such folder"
        if NAME in list_names(path):
            reason = "was set aside as corrupt, or renamed: expected the folder name step-<N>"
        raise UserError(f"checkpoint {path}: {reason}; `lmtrain train` saves them")
    return found


def _complete(folder: str, recursive: bool = False) -> list[Checkpoint]:
    """Complete checkpoints in `folder`, sorted by step, then path."""
    found = []
    for path in _manifests(join(folder).rstrip("/") or "/", recursive):
        match = _STEP.fullmatch(os.path.basename(path))
        if match:
            found.append(Checkpoint(int(match[1]), path))
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.path))


def _manifests(folder: str, recursive: bool) -> Iterable[str]:
    """Folders that contain a manifest."""
    if is_url(folder):  # one listing of everything: object stores have no folders
        files: Mapping[str, int] = list_files(folder)
        places = [os.path.dirname(name) for name in files if os.path.basename(name) == NAME]
        outer = [place for place in places if not any(map(_STEP.fullmatch, place.split("/")[:-1]))]
        return [join(folder, place) for place in outer]
    if not recursive:
        return [join(folder, name) for name in list_names(folder) if os.path.isfile(join(folder, name, NAME))]
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        if NAME in names:
            found.append(place)
        folders[:] = [name for name in folders if not _STEP.fullmatch(os.path.basename(place))]
    return found
