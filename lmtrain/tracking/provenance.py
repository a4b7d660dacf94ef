"""Provenance of a run: facts about the git repository that it was started from, its code files, and XLA dumps."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import MASK, redact, without

# Timeout of a call of git, which may wait for a slow file system.
_GIT_SECONDS = 2.0
# Maximum total size of the files to save.
_MAX_BYTES = 64 << 20


def git_facts() -> dict[str, Any] | None:
    """Commit, branch, remote (without credentials) and `changed`: whether tracked files differ from the commit.

    What git does not know, or not in time, is null. Returns None if there is no repository or no git.
    """
    if (root := code_root()) is None:
        return None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return {
        "commit": _git(root, "rev-parse", "--verify", "HEAD") or None,
        "branch": _git(root, "symbolic-ref", "--short", "HEAD") or None,
        "changed": None if changes is None else bool(changes),
        "remote": _without_credentials(_git(root, "config", "--get", "remote.origin.url") or "") or None,
    }


def remote_with_credentials() -> str | None:
    """The remote of the current folder's git repository without its credentials; None if it has none."""
    remote = _git(os.getcwd(), "config", "--get", "remote.origin.url") or ""
    shown = _without_credentials(remote)
    return None if shown == remote else shown


def code_root() -> str | None:
    """The git repository of the main script; for the command `lmtrain` that of the current folder, None if none."""
    script = os.path.abspath(sys.argv[0])
    folder = os.path.dirname(script)
    is_command = not script.endswith(".py") or os.path.basename(folder) == "lmtrain"  # installed, or `python -m`
    folders = [os.getcwd(), folder] if is_command else [folder, os.getcwd()]
    return next((root for place in folders if (root := _git(place, "rev-parse", "--show-toplevel"))), None)


def code_files(root: str, secrets: Sequence[str] = ()) -> set[str]:
    """Paths of the files that git tracks, as they are now, without links, .env files and files that hold `secrets`."""
    listed = _git(root, "ls-files", "-z") or ""
    paths = (os.path.join(root, name) for name in listed.split("\0") if name and not _is_environment(name))
    files = {path for path in paths if os.path.isfile(path) and not os.path.islink(path)}
    if (size := sum(map(os.path.getsize, files))) > _MAX_BYTES:
        log.info(f"the code of {root} is large ({size >> 20} MiB): only its commit is saved, not its files")
        return set()
    holding = {path for path in files if _holds(path, secrets)}
    if holding:
        names = ", ".join(sorted(os.path.relpath(path, root) for path in holding))
        log.warning(f"{names}: not saved with the code, as they hold secrets of the config")
    return files - holding


def xla_dump_folder() -> str:
    """The dump folder in XLA_FLAGS. Raises `UserError` if there is none."""
    flags = shlex.split(os.environ.get("XLA_FLAGS", ""))
    folders = [flag.partition("=")[2] for flag in flags if flag.startswith("--xla_dump_to=")]
    if folders and folders[-1]:  # XLA uses the last one
        return folders[-1]
    raise UserError(
        "trainer.tracker.save_xla_dumps: no dump folder; set the environment variable "
        "XLA_FLAGS=--xla_dump_to=FOLDER, or turn save_xla_dumps off"
    )


def find_xla_dumps() -> str | None:
    """The dump folder; None, with a warning, if XLA dumped nothing."""
    folder = xla_dump_folder()
    if os.path.isdir(folder) and os.listdir(folder):
        return folder
    log.warning(f"XLA dumped nothing to {folder}: all programs came from the compilation cache")
    return None


def _is_environment(name: str) -> bool:
    base = os.path.basename(name)
    return base.startswith(".env") or base.endswith(".env")


def _holds(path: str, secrets: Sequence[str]) -> bool:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        text = file.read()
    return without(text, secrets) != text


def _without_credentials(remote: str) -> str:
    return redact(remote).replace(f"{MASK}@", "")


def _git(folder: str, *arguments: str) -> str | None:
    """What git prints; None if it fails, is missing, or takes too long."""
    # the user may be running git at the same time
    command = ["git", "--no-optional-locks", "-C", folder, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape").rstrip("\n")
