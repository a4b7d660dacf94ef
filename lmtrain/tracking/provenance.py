"""Provenance of a run: the code it was started from, and XLA dumps.

Both are stored in the run's log folder and, as artifacts, in its trackers.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence

from lmtrain.config.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.tracking.config import TrackerConfig, WandbConfig
from lmtrain.tracking.tracker import Tracker

# Maximum total size of a repository's files to archive; larger ones are recorded by their commit only.
_MOST_ARCHIVE_BYTES = 64 << 20
_GIT_SECONDS = 30.0
# Options for a diff that `git apply` accepts, independent of the user's git settings.
_PLAIN = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")
_SECRETS_IN_URL = re.compile(r"(?<=://)[^/]*@")


class Provenance:
    """Saves what the W&B trackers in `configs` enable: the code in the background, XLA dumps at the end.

    Raises `UserError` if XLA dumps are enabled but XLA_FLAGS has no dump folder.
    """

    def __init__(self, configs: Sequence[TrackerConfig], folder: str, run: str, tracker: Tracker):
        wandb = [config for config in configs if isinstance(config, WandbConfig)]
        self._folder, self._run, self._tracker = folder, run, tracker
        self._dumps = any(config.save_xla_dumps for config in wandb)
        if self._dumps:
            xla_dump_folder()
        self._thread = threading.Thread(target=self._keep_code, name="keeping the code", daemon=True)
        if any(config.save_code for config in wandb):
            self._thread.start()

    def finish(self) -> None:
        """Call before the trackers are finished."""
        if self._thread.is_alive():
            self._thread.join(_GIT_SECONDS)
        if self._dumps:
            self._hand_over(keep_xla_dumps(os.path.join(self._folder, "xla_dumps")), "xla-dumps")

    def _keep_code(self) -> None:
        self._hand_over(keep_code(os.path.join(self._folder, "code")), "code")

    def _hand_over(self, path: str | None, kind: str) -> None:
        if path is not None:
            self._tracker.artifact(path, f"{self._run}-{kind}", kind)


def keep_code(folder: str, place: str | None = None) -> str | None:
    """Save the git repository of the main script to `folder`; returns None if there is none.

    For the command `lmtrain`, which is not a user's script, it is the repository of the current folder.

    `git.json` has commit, branch, remote and changed files, `changes.diff` the differences from the commit, and
    `code.tar.gz` the files of the commit.
    """
    try:
        root = _find_repository([place] if place else _places(os.path.abspath(sys.argv[0])))
        if root is None:
            return None
        os.makedirs(folder, exist_ok=True)
        facts = describe_repository(root)
        with open(os.path.join(folder, "git.json"), "w", encoding="utf-8") as file:
            json.dump(facts, file, indent=2, ensure_ascii=False)
        with open(os.path.join(folder, "changes.diff"), "wb") as file:
            file.write(_git(root, "diff", *_PLAIN, "HEAD") if facts["commit"] else b"")
        if facts["commit"]:
            _archive(root, os.path.join(folder, "code.tar.gz"))
        return folder
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(f"the code could not be saved with the run: {error}; training continues")
        return None


def describe_repository(root: str) -> dict[str, object]:
    """Commit, branch, remote (without passwords) and changed files of a git repository; null where there is none."""
    changed = _git(root, "status", "--porcelain").decode(errors="replace").splitlines()
    facts = {
        "root": root,
        "commit": _line(root, "rev-parse", "--verify", "HEAD"),
        "branch": _line(root, "symbolic-ref", "--short", "HEAD"),
        "remote": _line(root, "config", "--get", "remote.origin.url"),
    }
    if facts["remote"]:
        facts["remote"] = _SECRETS_IN_URL.sub("", facts["remote"])
    return {**facts, "changed": changed}


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


def keep_xla_dumps(folder: str) -> str | None:
    """Copy XLA dumps to `folder`; returns None if there are none."""
    dumped = xla_dump_folder()
    if not os.path.isdir(dumped) or not os.listdir(dumped):
        log.warning(f"XLA dumped nothing to {dumped}: all programs came from the compilation cache")
        return None
    if os.path.realpath(dumped) == os.path.realpath(folder):
        return folder  # XLA dumped to this folder

    def itself(place: str, names: list[str]) -> list[str]:
        return [name for name in names if os.path.realpath(os.path.join(place, name)) == os.path.realpath(folder)]

    try:
        shutil.copytree(dumped, folder, ignore=itself, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        log.warning(f"XLA dumps in {dumped} could not be saved with the run: {error}")
        return None
    return folder


def _places(script: str) -> list[str]:
    """Folders in which to look for a repository, the most likely first."""
    folder = os.path.dirname(script)
    is_command = not script.endswith(".py") or os.path.basename(folder) == "lmtrain"  # installed, or `python -m`
    return [os.getcwd(), folder] if is_command else [folder, os.getcwd()]


def _find_repository(places: list[str]) -> str | None:
    for place in places:
        try:
            return _git(place, "rev-parse", "--show-toplevel").decode().strip()
        except (subprocess.CalledProcessError, OSError):
            continue  # no repository there, no such folder, or no git
    return None


def _archive(root: str, path: str) -> None:
    entries = [line.split(maxsplit=4) for line in _git(root, "ls-tree", "-r", "-l", "HEAD").splitlines()]
    size = sum(int(size) for _, kind, _, size, _ in entries if kind == b"blob")
    if size > _MOST_ARCHIVE_BYTES:
        log.info(
            f"the code of {root} is large ({size >> 20} MiB): only its commit and changes are saved, not its files"
        )
        return
    _git(root, "archive", "--format=tar.gz", "-o", os.path.abspath(path), "HEAD")


def _line(root: str, *arguments: str) -> str | None:
    try:
        return _git(root, *arguments).decode(errors="replace").strip() or None
    except subprocess.CalledProcessError:
        return None


def _git(place: str, *arguments: str) -> bytes:
    done = subprocess.run(
        ["git", "--no-optional-locks", "-C", place, *arguments],  # the user may be running git at the same time
        capture_output=True,
        check=True,
        timeout=_GIT_SECONDS,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout
