"""The checkpoint folder of a run, as its only owner sees it: cleaned of partial and corrupt checkpoints."""

import contextlib
import itertools
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.config import Kind
from lmtrain.checkpoint.discovery import (
    Checkpoint,
    list_checkpoints,
    list_partial,
    list_without_manifest,
    partial_marker,
    step_folder,
)
from lmtrain.checkpoint.manifest import NAME, DamagedError, Manifest, write_manifest
from lmtrain.runtime.errors import RunError, UserError, errors_of
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import (
    FileLock,
    check_writable,
    delete_file,
    delete_folder,
    is_url,
    join,
    list_names,
    read_json,
    remove_temporaries,
    rename_folder,
    write_bytes,
    write_json,
)

# Exclusive access to a run's checkpoints: only one run with the same id saves at a time.
#
# On a local disk, a lock that ends with its process makes a second run with the same id refuse to start. Where locks
# are unsupported, the newest start wins: it writes a marker file, and an older run that finds another marker stops
# saving.

_LOCK = "lock"
_MARK = "attempt.json"


class TakenOverError(RunError):
    """Another process has started the same run in the meantime; this one must not save any more."""


class Claim:
    """Exclusive right of one process to save to `folder`. Raises `UserError` if another process has it."""

    def __init__(self, folder: str):
        self._folder = folder
        self._lock = None if is_url(folder) else FileLock(os.path.join(folder, _LOCK))
        if self._lock is not None and not self._lock.acquire():
            raise UserError(
                f"{folder}: locked by another run with the same id ({self._lock.holder()}); wait until it ends, "
                "or set another --trainer.id"
            )
        self._id = uuid.uuid4().hex
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        mark = {"id": self._id, "host": socket.gethostname(), "process": os.getpid(), "started": started}
        write_json(join(folder, _MARK), mark)

    def check(self) -> None:
        """Raise `TakenOverError` if a newer start of the same run has written its marker."""
        mark = self._mark()
        if mark.get("id", self._id) != self._id:
            raise TakenOverError(
                f"{self._folder}: the same run was started again at {mark.get('started')} on {mark.get('host')} "
                f"(process {mark.get('process')}); this older one exits without saving"
            )

    def release(self) -> None:
        """Release the folder. A second call has no effect."""
        with contextlib.suppress(OSError, UserError):  # a marker that remains does no harm
            if self._mark().get("id") == self._id:
                delete_file(join(self._folder, _MARK))
        if self._lock is not None:
            self._lock.release()

    def _mark(self) -> dict[str, Any]:
        """The current marker; empty if it is missing or unreadable."""
        try:
            mark = read_json(join(self._folder, _MARK))
        except UserError:  # a store that does not respond says nothing about the marker
            raise
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}


_SETTING = "trainer.checkpointer.base_path"
# Number of checks, and seconds between them, for files that a failed save is still writing.
_LATE_TRIES, _LATE_SECONDS = 20, 0.1


class RunFolder:
    """Folder locked by the first process of a run. Raises `UserError` if another run with the same id has locked it.

    Cleans up after a killed process: folders that were being written or deleted are deleted, those that have lost
    their manifest are set aside.
    """

    def __init__(self, path: str):
        self.path = path
        self.claim = Claim(path)
        self._temporary: list[Checkpoint] = []
        self._failed: set[int] = set()
        try:
            self._clean()
        except BaseException:
            self.claim.release()
            raise

    def begin(self, step: int) -> None:
        """Mark the folder of `step` as partial. Raises `TakenOverError` if the run was started again elsewhere."""
        self.claim.check()
        self._delete_late()
        folder = step_folder(self.path, step)
        if os.path.basename(folder) in list_names(self.path):
            self.move_away(folder, "earlier")
        write_bytes(partial_marker(self.path, step), b"")

    def complete(self, manifest: Manifest, best_step: int | None = None) -> None:
        """Write the manifest, then delete the temporary checkpoints before this one, except that of `best_step`."""
        self.claim.check()
        checkpoint = Checkpoint(manifest.step, step_folder(self.path, manifest.step))
        write_manifest(checkpoint.path, manifest)
        delete_file(partial_marker(self.path, manifest.step))
        self._failed.discard(manifest.step)
        for old in [old for old in self._temporary if old.step != best_step]:
            try:
                self._delete(old.step)
            except (OSError, UserError) as error:
                log.warning(f"{old.path} could not be deleted, will retry: {error}")
            else:
                self._temporary.remove(old)
        if manifest.kind is Kind.TEMPORARY:
            self._temporary.append(checkpoint)

    def discard(self, step: int) -> None:
        """Delete the files of a failed save: they may be what fills the disk."""
        self._failed.add(step)
        with contextlib.suppress(OSError, UserError):
            self._delete(step)

    def release(self) -> None:
        """Delete the files of failed saves, and unlock the folder. Never raises: the folder may have been deleted."""
        with contextlib.suppress(TakenOverError, OSError, UserError):
            self.claim.check()
            for _ in range(_LATE_TRIES if self._failed else 0):
                time.sleep(_LATE_SECONDS)
                if not self._delete_late():
                    break
        self.claim.release()

    def move_away(self, path: str, prefix: str) -> None:
        """Rename a step's folder so that it no longer counts as a checkpoint; it is never deleted."""
        name = f"{prefix}-{os.path.basename(path)}"
        taken = set(list_names(self.path))
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
        new = join(self.path, next(free for free in names if free not in taken))
        rename_folder(path, new)
        self._temporary = [checkpoint for checkpoint in self._temporary if checkpoint.path != path]
        log.warning(f"{path} was set aside as {os.path.basename(new)}")

    def _delete(self, step: int) -> None:
        """Delete a step's folder, in an order that never leaves what looks like a complete or corrupt checkpoint."""
        folder = step_folder(self.path, step)
        write_bytes(partial_marker(self.path, step), b"")
        delete_file(join(folder, NAME))
        delete_folder(folder)
        self._delete_unnamed(f"{os.path.basename(folder)}.")
        delete_file(partial_marker(self.path, step))

    def _delete_unnamed(self, start: str) -> None:
        """Delete Orbax's temporary folders (on file systems, where Orbax renames them when they are complete)."""
        for name in list_names(self.path):
            if name.startswith(start) and "orbax-checkpoint-tmp" in name:
                delete_folder(join(self.path, name))

    def _delete_late(self) -> bool:
        """Delete files of failed saves that appeared after `discard`; returns whether there were any.

        A save fails at its first error, while TensorStore's threads still write its other arrays: they create missing
        folders, and a deletion at the same time fails and leaves the step's marker.
        """
        names = list_names(self.path)
        late = [step for step in self._failed if any(name.startswith(f"step-{step}.") for name in names)]
        with contextlib.suppress(OSError, UserError):
            for step in late:
                self._delete(step)
        return bool(late)

    def _clean(self) -> None:
        complete = list_checkpoints(self.path)
        steps = {checkpoint.step for checkpoint in complete}
        for step in list_partial(self.path):
            if step in steps:  # it is complete, and only its marker was not deleted
                delete_file(partial_marker(self.path, step))
            else:
                self._delete(step)
        self._delete_unnamed("step-")
        if not is_url(self.path):
            remove_temporaries(self.path)
        for path in list_without_manifest(self.path):
            log.error(f"{path} is corrupt: {NAME} is missing")
            self.move_away(path, "damaged")
        for checkpoint in complete:
            with contextlib.suppress(DamagedError):  # reported when the checkpoint is loaded
                if checkpoint.read_manifest().kind is Kind.TEMPORARY:
                    self._temporary.append(checkpoint)


def create_folder(folder: str) -> list[str]:
    """Create the folder; returns the folders that did not exist before, the innermost first.

    Raises OSError, and `UserError` for a URL, if it is not writable.
    """
    if not is_url(folder):
        missing = [str(path) for path in (Path(folder), *Path(folder).parents) if not path.exists()]
        os.makedirs(folder, exist_ok=True)
        return missing
    with errors_of(_SETTING):
        check_writable(folder)
    return []


@contextmanager
def naming_the_setting(folder: str) -> Iterator[None]:
    """Convert errors of the file system to errors that name the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{_SETTING}: {folder} cannot be used: {error.strerror or error}; set it to a folder that you can write "
            "to, or to a URL such as gs://bucket/checkpoints"
        ) from None
