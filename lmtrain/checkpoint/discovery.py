"""Discovery of checkpoints at paths and URLs. A step folder is a checkpoint once it has its manifest.

A run's folder may also contain `step-<N>.partial`, a marker that the folder `step-<N>` is being written or deleted, and
`damaged-step-<N>`, a corrupt checkpoint that was set aside.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmtrain.checkpoint.manifest import NAME, DamagedError, Manifest, read_manifest
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import is_url, join, list_files, list_names, read_json

RUN_INFO = "run.json"
# More folders are no folder of checkpoints, but a file system, such as / or /proc.
_MAX_FOLDERS = 20_000
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
    folder = join(run_folder).rstrip("/")
    return [checkpoint for checkpoint in _complete(folder) if os.path.dirname(checkpoint.path) == folder]


def list_partial(run_folder: str) -> list[int]:
    """The steps whose folders were being written or deleted when the process ended."""
    return _steps(run_folder, _PARTIAL)


def list_set_aside(run_folder: str) -> list[str]:
    """Paths of the corrupt checkpoints that were set aside."""
    return [join(run_folder, name) for name in list_names(run_folder) if name.startswith("damaged-step-")]


def list_without_manifest(run_folder: str) -> list[str]:
    """Paths of corrupt step folders: neither complete nor being written or deleted."""
    fine = {checkpoint.step for checkpoint in list_checkpoints(run_folder)} | set(list_partial(run_folder))
    return [step_folder(run_folder, step) for step in _steps(run_folder, _STEP) if step not in fine]


def find_checkpoints(path: str) -> list[Checkpoint]:
    """The checkpoint at `path`, or all checkpoints below it (a run folder or any parent), sorted by step.

    Raises `UserError` if there is none.
    """
    if not path:
        raise UserError("checkpoint '': expected a path")
    path = join(path).rstrip("/") or "/"
    names = list_names(path)
    match = _STEP.fullmatch(os.path.basename(path))
    if match and NAME in names:
        return [Checkpoint(int(match[1]), path)]
    checkpoints = _complete(path, recursive=True)
    if not checkpoints:
        reason = "there is no complete checkpoint in it" if names or os.path.isdir(path) else "no such folder"
        if NAME in names:
            reason = "was set aside as corrupt, or renamed: expected the folder name step-<N>"
        raise UserError(f"checkpoint {path}: {reason}; `lmtrain train` saves them")
    return checkpoints


def _steps(run_folder: str, pattern: re.Pattern[str]) -> list[int]:
    return sorted(int(match[1]) for name in list_names(run_folder) if (match := pattern.fullmatch(name)))


def _complete(folder: str, recursive: bool = False) -> list[Checkpoint]:
    """Complete checkpoints in `folder`, sorted by step, then path."""
    matches = [(path, _STEP.fullmatch(os.path.basename(path))) for path in _with_manifest(folder or "/", recursive)]
    checkpoints = [Checkpoint(int(match[1]), path) for path, match in matches if match]
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.path))


def _with_manifest(folder: str, recursive: bool) -> Iterator[str]:
    """Yield the folders that contain a manifest, except those within a step's folder."""
    if is_url(folder):  # one listing of everything: object stores have no folders
        for inner, name in map(os.path.split, list_files(folder)):
            if name == NAME and not any(map(_STEP.fullmatch, inner.split("/")[:-1])):
                yield join(folder, inner)
        return
    seen: set[tuple[int, int]] = set()
    for path, folders, names in os.walk(folder, followlinks=True):
        if not _is_new(path, seen):  # links may form a loop
            folders.clear()
            continue
        if len(seen) > _MAX_FOLDERS:
            raise UserError(f"checkpoint {folder}: has more than {_MAX_FOLDERS:,} folders; name the folder of a run")
        if NAME in names:
            yield path
        if _STEP.fullmatch(os.path.basename(path)) or not (recursive or path == folder):
            folders.clear()
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        folders[:] = [*sorted(set(folders).difference(links)), *sorted(links)]  # a folder before its links


def _is_new(path: str, seen: set[tuple[int, int]]) -> bool:
    """Whether this folder, which may have several paths, is not among `seen`; it is added."""
    try:
        state = os.stat(path)
    except OSError:  # deleted meanwhile
        return False
    key, number = (state.st_dev, state.st_ino), len(seen)
    seen.add(key)
    return len(seen) > number
