"""A run's folder of checkpoints as its one owner sees it: cleaned, and with nothing in it that only looks whole."""

import contextlib
import itertools
import os
import time

from lmtrain.checkpoint.claim import Claim, TakenOverError
from lmtrain.checkpoint.discovery import (
    Checkpoint,
    list_checkpoints,
    list_partial,
    list_step_folders,
    list_without_manifest,
    partial_marker,
    step_folder,
)
from lmtrain.checkpoint.manifest import NAME, DamagedError, Manifest, write_manifest
from lmtrain.checkpoint.policies import Kind
from lmtrain.config.errors import UserError
from lmtrain.runtime.atomic_files import remove_temporaries
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import (
    delete_file,
    delete_folder,
    is_url,
    join,
    list_names,
    rename_folder,
    write_bytes,
)

# How often, and how long apart, a folder is looked at for files that a failed save still writes.
_LATE_TRIES, _LATE_SECONDS = 20, 0.1


class RunFolder:
    """Held by the first process of a run, and by no other run of the same id. Raises `UserError` if one has it.

    What a killed process left is put in order: folders that were being written or deleted are deleted, those that have
    lost their manifest are set aside.
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
        if step in list_step_folders(self.path):
            self.move_away(step_folder(self.path, step), "earlier")
        write_bytes(partial_marker(self.path, step), b"")

    def complete(self, manifest: Manifest) -> None:
        """Write the manifest, then delete the temporary checkpoints before this one."""
        self.claim.check()
        checkpoint = Checkpoint(manifest.step, step_folder(self.path, manifest.step))
        write_manifest(checkpoint.path, manifest)
        delete_file(partial_marker(self.path, manifest.step))
        self._failed.discard(manifest.step)
        for old in list(self._temporary):
            try:
                self._delete(old.step)
            except (OSError, UserError) as error:
                log.warning(f"{old.path} could not be deleted, will retry: {error}")
            else:
                self._temporary.remove(old)
        if manifest.kind is Kind.TEMPORARY:
            self._temporary.append(checkpoint)

    def discard(self, step: int) -> None:
        """Delete what there is of a save that failed: it may be what fills the disk."""
        self._failed.add(step)
        with contextlib.suppress(OSError, UserError):
            self._delete(step)

    def release(self) -> None:
        """Delete what failed saves left, and let others claim the folder. Raises nothing: the folder may be gone."""
        with contextlib.suppress(TakenOverError, OSError, UserError):
            self.claim.check()
            for _ in range(_LATE_TRIES if self._failed else 0):
                time.sleep(_LATE_SECONDS)
                if not self._delete_late():
                    break
        self.claim.release()

    def move_away(self, path: str, prefix: str) -> None:
        """Give a step's folder a name that is none of a checkpoint; it is never deleted."""
        name = f"{prefix}-{os.path.basename(path)}"
        taken = set(list_names(self.path))
        names = itertools.chain([name], (f"{name}.{number}" for number in itertools.count(1)))
        new = join(self.path, next(free for free in names if free not in taken))
        rename_folder(path, new)
        self._temporary = [checkpoint for checkpoint in self._temporary if checkpoint.path != path]
        log.warning(f"{path} was set aside as {os.path.basename(new)}")

    def _delete(self, step: int) -> None:
        """Killed in between, it does not look like a checkpoint, nor like one that was damaged."""
        folder = step_folder(self.path, step)
        write_bytes(partial_marker(self.path, step), b"")
        delete_file(join(folder, NAME))
        delete_folder(folder)
        self._delete_unnamed(f"{os.path.basename(folder)}.")
        delete_file(partial_marker(self.path, step))

    def _delete_unnamed(self, start: str) -> None:
        """Delete what Orbax had not given its name yet (at paths, where it renames)."""
        for name in list_names(self.path):
            if name.startswith(start) and "orbax-checkpoint-tmp" in name:
                delete_folder(join(self.path, name))

    def _delete_late(self) -> bool:
        """Delete what there is of failed saves after `discard`; returns whether there was anything.

        A save fails at its first error, while TensorStore's threads still write other arrays of it: they make the
        folders that they miss, and a deletion that meets them fails, with the step's mark left behind.
        """
        found = False
        try:
            for step in self._failed:
                start = f"{os.path.basename(step_folder(self.path, step))}."
                if any(name.startswith(start) for name in list_names(self.path)):
                    found = True
                    self._delete(step)
        except (OSError, UserError):
            return True
        return found

    def _clean(self) -> None:
        complete = list_checkpoints(self.path)
        steps = {checkpoint.step for checkpoint in complete}
        for step in list_partial(self.path):
            if step in steps:  # it was complete but for the removal of its mark
                delete_file(partial_marker(self.path, step))
            else:
                self._delete(step)
        self._delete_unnamed("step-")
        if not is_url(self.path):
            remove_temporaries(self.path)
        for path in list_without_manifest(self.path):
            log.error(f"{path} is damaged: it has no {NAME}")
            self.move_away(path, "damaged")
        for checkpoint in complete:
            with contextlib.suppress(DamagedError):  # which is found out when it is to be used
                if checkpoint.read_manifest().kind is Kind.TEMPORARY:
                    self._temporary.append(checkpoint)
