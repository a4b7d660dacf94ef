"""`lmtrain checkpoint list|inspect|verify PATH`: list checkpoints, show one, verify checksums.

PATH is a checkpoint, a run's folder, or any folder above; a path or URL.
"""

import os
import time
from collections.abc import Sequence

from lmtrain.checkpoint.discovery import (
    Checkpoint,
    find_checkpoints,
    list_partial,
    list_set_aside,
    list_without_manifest,
    partial_marker,
)
from lmtrain.checkpoint.manifest import DamagedError
from lmtrain.checkpoint.verify import FULL, verify
from lmtrain.commands.arguments import Parser
from lmtrain.config.tree import describe_differences, dotted, walk_leaves
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.progress import format_bytes, format_seconds
from lmtrain.runtime.redact import redact


def run(argv: list[str]) -> int:
    description = "List checkpoints, show the contents of the newest, or verify the checksums of all files."
    parser = Parser("checkpoint", description)
    meanings = "; ".join(f"{name}: {action.__doc__}" for name, action in _ACTIONS.items())
    parser.add_argument("action", choices=list(_ACTIONS), help=meanings)
    parser.add_argument("path", metavar="PATH", help="a checkpoint, a run's folder, or any folder above; a path or URL")
    arguments = parser.parse_args(argv)
    return _ACTIONS[arguments.action](arguments.path)


def _list(path: str) -> int:
    """all checkpoints with kind, size and age"""
    try:
        runs = _by_run(find_checkpoints(path))
    except UserError:
        if not _unusable(path):
            raise
        runs = {path: []}
    for folder, checkpoints in runs.items():
        _print(folder)
        for before, checkpoint in zip([None, *checkpoints], checkpoints, strict=False):
            _print(f"  {_summary(checkpoint)}")
            for line in _changes(before, checkpoint):
                _print(f"    {line}")
        for line in _unusable(folder):
            _print(f"  {line}")
    return 0


def _inspect(path: str) -> int:
    """contents of the newest checkpoint"""
    checkpoints = find_checkpoints(path)
    checkpoint = checkpoints[-1]
    before = [None, *_by_run(checkpoints)[os.path.dirname(checkpoint.path)]][-2]
    try:
        manifest = checkpoint.read_manifest()
    except DamagedError as error:
        raise UserError(f"{checkpoint.path} is corrupt: {error}") from None
    info = checkpoint.read_run_info()
    sizes: dict[str, int] = {}
    for name, record in manifest.files.items():
        part = name.split("/")[0] if "/" in name else ""
        sizes[part] = sizes.get(part, 0) + record.size
    described = {part: info.get(part) or {} for part in ("machine", "git", "versions")}
    rows = {
        "run": info["run_id"],
        "saved": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(manifest.saved)),
        "arrays": ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes.items() if part),
        **{
            part: ", ".join(f"{name} {value}" for name, value in values.items())
            for part, values in described.items()
            if values
        },
    }
    _print(checkpoint.path)
    _print(f"  {_summary(checkpoint)}")
    for name, text in rows.items():
        _print(f"  {name:<9} {text}")
    _print("  settings that identify the run:")
    for where, value in walk_leaves(redact(info["identity"])):
        if where:
            _print(f"    {dotted(where)} = {value!r}")
    for line in _changes(before, checkpoint):
        _print(f"  {line}")
    return 0


def _verify(path: str) -> int:
    """checksums of all files of each checkpoint"""
    checkpoints = find_checkpoints(path)
    corrupt = 0
    for checkpoint in checkpoints:
        began = time.monotonic()
        try:
            verify(checkpoint, FULL)
        except DamagedError as error:
            corrupt += 1
            _print(f"{checkpoint.path}: CORRUPT: {error}")
            continue
        size, seconds = checkpoint.read_manifest().size, time.monotonic() - began
        _print(f"{checkpoint.path}: valid, {format_bytes(size)} read at {format_bytes(size / max(seconds, 1e-9))}/s")
    is_checkpoint = bool(checkpoints) and checkpoints[0].path == path.rstrip("/")
    for folder in [] if is_checkpoint else _by_run(checkpoints) or [path]:
        problems = dict.fromkeys(list_without_manifest(folder), "manifest missing")
        problems |= dict.fromkeys(list_set_aside(folder), "set aside by an earlier start")
        corrupt += len(problems)
        for unusable, problem in problems.items():
            _print(f"{unusable}: CORRUPT: {problem}")
    return 1 if corrupt else 0


_ACTIONS = {"list": _list, "inspect": _inspect, "verify": _verify}


def _print(line: str) -> None:
    print(redact(line))


def _by_run(checkpoints: Sequence[Checkpoint]) -> dict[str, list[Checkpoint]]:
    """The checkpoints of each folder of a run, oldest first."""
    runs: dict[str, list[Checkpoint]] = {}
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: os.path.dirname(checkpoint.path)):
        runs.setdefault(os.path.dirname(checkpoint.path), []).append(checkpoint)
    return runs


def _summary(checkpoint: Checkpoint) -> str:
    try:
        manifest = checkpoint.read_manifest()
    except DamagedError as error:
        return f"step-{checkpoint.step:<9} CORRUPT: {error}"
    age = format_seconds(max(0.0, time.time() - manifest.saved))
    return f"step-{checkpoint.step:<9} {manifest.kind.value:<9} {format_bytes(manifest.size):>10}  {age} ago"


def _changes(before: Checkpoint | None, now: Checkpoint) -> list[str]:
    """Differences of the config from that of the previous checkpoint."""
    if before is None:
        return []
    try:
        old, new = (checkpoint.read_run_info()["config"] for checkpoint in (before, now))
    except (DamagedError, KeyError):  # `verify` reports these
        return []
    return describe_differences(old, new, f"step-{before.step}", f"step-{now.step}")


def _unusable(folder: str) -> list[str]:
    """Entries of a run's folder that are not usable checkpoints."""
    kinds = {
        "CORRUPT: manifest missing": list_without_manifest(folder),
        "being written or deleted": [partial_marker(folder, step) for step in list_partial(folder)],
        "corrupt, set aside": list_set_aside(folder),
    }
    return [f"{os.path.basename(path):<14} {text}" for text, paths in kinds.items() for path in paths]
