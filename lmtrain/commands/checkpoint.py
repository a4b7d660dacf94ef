"""`lmtrain checkpoint list|inspect|verify PATH`: list checkpoints, show one, verify checksums.

PATH is a checkpoint, a run's folder, or any folder above; a path or URL.
"""

import os
import time
from typing import Any

from lmtrain.checkpoint.discovery import (
    Checkpoint,
    find_checkpoints,
    list_partial,
    list_set_aside,
    list_without_manifest,
    partial_marker,
)
from lmtrain.checkpoint.manifest import DamagedError, Manifest
from lmtrain.checkpoint.verify import FULL, verify
from lmtrain.commands.arguments import Parser
from lmtrain.config.differences import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.config.layers import dotted, walk_leaves
from lmtrain.runtime.progress import format_bytes, format_seconds


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
        found = find_checkpoints(path)
    except UserError:
        if not _unusable(path):
            raise
        found = []
    for folder in sorted({os.path.dirname(checkpoint.path) for checkpoint in found}) or [path]:
        print(folder)
        before: Checkpoint | None = None
        for checkpoint in [c for c in found if os.path.dirname(c.path) == folder]:
            print(f"  {_row(checkpoint)}")
            for line in _changes(before, checkpoint):
                print(f"    {line}")
            before = checkpoint
        for line in _unusable(folder):
            print(f"  {line}")
    return 0


def _inspect(path: str) -> int:
    """contents of the newest checkpoint"""
    found = find_checkpoints(path)
    checkpoint = found[-1]
    manifest = _manifest(checkpoint)
    info = checkpoint.read_run_info()
    sizes: dict[str, int] = {}
    for name, record in manifest.files.items():
        part = name.split("/")[0] if "/" in name else ""
        sizes[part] = sizes.get(part, 0) + record.size
    print(checkpoint.path)
    print(f"  {_row(checkpoint)}")
    rows = {
        "run": info["run_id"],
        "saved": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(manifest.saved)),
        "arrays": ", ".join(f"{part} {format_bytes(size)}" for part, size in sizes.items() if part),
        "machine": _plain(info["machine"]),
        "versions": _plain(info["versions"]),
    }
    for name, text in rows.items():
        print(f"  {name:<9} {text}")
    print("  settings that identify the run:")
    for where, value in walk_leaves(info["identity"]):
        if where:
            print(f"    {dotted(where)} = {value!r}")
    earlier = [c for c in found if os.path.dirname(c.path) == os.path.dirname(checkpoint.path)][:-1]
    for line in _changes(earlier[-1] if earlier else None, checkpoint):
        print(f"  {line}")
    return 0


def _verify(path: str) -> int:
    """checksums of all files of each checkpoint"""
    found = find_checkpoints(path)
    damaged = 0
    for checkpoint in found:
        began = time.monotonic()
        try:
            verify(checkpoint, FULL)
        except DamagedError as error:
            damaged += 1
            print(f"{checkpoint.path}: CORRUPT: {error}")
            continue
        size, seconds = checkpoint.read_manifest().size, time.monotonic() - began
        print(f"{checkpoint.path}: valid, {format_bytes(size)} read at {format_bytes(size / max(seconds, 1e-9))}/s")
    for folder in _run_folders(found, path):
        for place in list_without_manifest(folder):
            damaged += 1
            print(f"{place}: CORRUPT: manifest missing")
        for place in list_set_aside(folder):
            damaged += 1
            print(f"{place}: CORRUPT: set aside by an earlier start")
    return 1 if damaged else 0


def _run_folders(found: list[Checkpoint], path: str) -> list[str]:
    """The run folders to check; none if `path` is a checkpoint."""
    folders = sorted({os.path.dirname(checkpoint.path) for checkpoint in found})
    return [] if found and found[0].path == path.rstrip("/") else folders or [path]


_ACTIONS = {"list": _list, "inspect": _inspect, "verify": _verify}


def _row(checkpoint: Checkpoint) -> str:
    try:
        manifest = checkpoint.read_manifest()
    except DamagedError as error:
        return f"step-{checkpoint.step:<9} CORRUPT: {error}"
    age = format_seconds(max(0.0, time.time() - manifest.saved))
    return f"step-{checkpoint.step:<9} {manifest.kind.value:<9} {format_bytes(manifest.size):>10}  {age} ago"


def _manifest(checkpoint: Checkpoint) -> Manifest:
    try:
        return checkpoint.read_manifest()
    except DamagedError as error:
        raise UserError(f"{checkpoint.path} is corrupt: {error}") from None


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


def _plain(value: dict[str, Any]) -> str:
    return ", ".join(f"{name} {part}" for name, part in value.items())
