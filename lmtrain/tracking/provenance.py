"""Provenance of a run: the code it was started from, which is stored in its log folder, and XLA dumps.

Both are artifacts of its trackers.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import MASK, redact, without
from lmtrain.tracking.config import TrackerConfig, WandbConfig
from lmtrain.tracking.tracker import Tracker

# Maximum total size of a repository's files to archive; larger ones are recorded by their commit only.
_MAX_ARCHIVE_BYTES = 64 << 20
_GIT_SECONDS = 30.0
# Options for a diff that `git apply` accepts, independent of the user's git settings.
_PLAIN = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/")


class Provenance:
    """Saves what the W&B trackers in `configs` enable: the code in the background, XLA's dump folder at the end.

    `secrets` are those of the run's config, which the code may contain.
    """

    def __init__(
        self, configs: Sequence[TrackerConfig], folder: str, run: str, tracker: Tracker, secrets: Sequence[str] = ()
    ):
        wandb = [config for config in configs if isinstance(config, WandbConfig)]
        self._folder, self._run, self._tracker, self._secrets = folder, run, tracker, secrets
        self._dumps = any(config.save_xla_dumps for config in wandb)
        self._thread = threading.Thread(target=self._keep_code, name="keeping the code", daemon=True)
        if any(config.save_code for config in wandb):
            self._thread.start()

    def finish(self) -> None:
        """Call before the trackers are finished."""
        if self._thread.is_alive():
            self._thread.join(_GIT_SECONDS)
        if self._dumps:
            self._hand_over(find_xla_dumps(), "xla-dumps")

    def _keep_code(self) -> None:
        self._hand_over(keep_code(os.path.join(self._folder, "code"), secrets=self._secrets), "code")

    def _hand_over(self, path: str | None, kind: str) -> None:
        if path is not None:
            self._tracker.artifact(path, f"{self._run}-{kind}", kind)


def keep_code(folder: str, start: str | None = None, secrets: Sequence[str] = ()) -> str | None:
    """Save the git repository of the main script to `folder`; returns None if there is none.

    For the command `lmtrain`, which is not a user's script, it is the repository of the current folder.

    `git.json` has commit, branch, remote and changed files, `changes.diff` the differences from the commit, and
    `code.tar.gz` the files of the commit. `secrets` are masked in the differences, and files with them are left out of
    the archive.
    """
    try:
        root = _find_repository([start] if start else _candidates(os.path.abspath(sys.argv[0])))
        if root is None:
            return None
        os.makedirs(folder, exist_ok=True)
        repository = describe_repository(root)
        with open(os.path.join(folder, "git.json"), "w", encoding="utf-8") as file:
            json.dump(repository, file, indent=2, ensure_ascii=False)
        changes = _git(root, "diff", *_PLAIN, "HEAD") if repository["commit"] else b""
        masked = without(changes.decode(errors="surrogateescape"), secrets).encode(errors="surrogateescape")
        if masked != changes:
            log.warning(f"secrets of the config are masked in {folder}/changes.diff, so it may not apply")
        with open(os.path.join(folder, "changes.diff"), "wb") as file:
            file.write(masked)
        if repository["commit"]:
            _archive(root, os.path.join(folder, "code.tar.gz"), secrets)
        return folder
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(f"the code could not be saved with the run: {error}; training continues")
        return None


def describe_repository(root: str) -> dict[str, object]:
    """Commit, branch, remote (without passwords) and changed files of a git repository; null where there is none."""
    remote = _line(root, "config", "--get", "remote.origin.url")
    return {
        "root": root,
        "commit": _line(root, "rev-parse", "--verify", "HEAD"),
        "branch": _line(root, "symbolic-ref", "--short", "HEAD"),
        "remote": remote and _without_credentials(remote),
        "changed": _git(root, "status", "--porcelain").decode(errors="replace").splitlines(),
    }


def remote_with_credentials() -> str | None:
    """The remote of the current folder's git repository without its credentials; None if it has none."""
    root = _find_repository([os.getcwd()])
    remote = None if root is None else _line(root, "config", "--get", "remote.origin.url")
    shown = None if remote is None else _without_credentials(remote)
    return None if shown == remote else shown


def _without_credentials(remote: str) -> str:
    return redact(remote).replace(f"{MASK}@", "")


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


def _candidates(script: str) -> list[str]:
    """Folders in which to look for a repository, the most likely first."""
    folder = os.path.dirname(script)
    is_command = not script.endswith(".py") or os.path.basename(folder) == "lmtrain"  # installed, or `python -m`
    return [os.getcwd(), folder] if is_command else [folder, os.getcwd()]


def _find_repository(folders: list[str]) -> str | None:
    for folder in folders:
        try:
            return _git(folder, "rev-parse", "--show-toplevel").decode().strip()
        except (subprocess.CalledProcessError, OSError):
            continue  # no repository there, no such folder, or no git
    return None


def _archive(root: str, path: str, secrets: Sequence[str]) -> None:
    entries = [line.split(maxsplit=4) for line in _git(root, "ls-tree", "-r", "-l", "HEAD").splitlines()]
    size = sum(int(size) for _, kind, _, size, _ in entries if kind == b"blob")
    if size > _MAX_ARCHIVE_BYTES:
        log.info(
            f"the code of {root} is large ({size >> 20} MiB): only its commit and changes are saved, not its files"
        )
        return
    holding = _files_with(root, secrets)
    if holding:
        log.warning(f"{', '.join(holding)}: not saved with the code, as they hold secrets of the config")
    paths = ["--", ".", *(f":(exclude,literal){name}" for name in holding)] if holding else []
    _git(root, "archive", "--format=tar.gz", "-o", os.path.abspath(path), "HEAD", *paths)


def _files_with(root: str, secrets: Sequence[str]) -> list[str]:
    """Files of the commit that contain any of the secrets."""
    searched = [secret for secret in secrets if without(secret, [secret]) != secret and "\n" not in secret]
    if not searched:
        return []
    try:  # from standard input: command lines are visible to all users of a machine
        names = _git(root, "grep", "-l", "-z", "-F", "-f", "-", "HEAD", text="\n".join(searched))
    except subprocess.CalledProcessError as error:
        if error.returncode == 1:  # none
            return []
        raise
    return [name.partition(":")[2] for name in names.decode(errors="surrogateescape").split("\0") if name]


def _line(root: str, *arguments: str) -> str | None:
    try:
        return _git(root, *arguments).decode(errors="replace").strip() or None
    except subprocess.CalledProcessError:
        return None


def _git(folder: str, *arguments: str, text: str = "") -> bytes:
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", folder, *arguments],  # the user may be running git at the same time
        capture_output=True,
        check=True,
        timeout=_GIT_SECONDS,
        input=text.encode(),
    ).stdout
