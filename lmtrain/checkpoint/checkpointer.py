"""Saving training state in the background.

A checkpoint is a folder `step-<N>` with the arrays `params`, `optimizer` and, if configured, `average`; `run.json`; and
`manifest.json`, which is written last. While the folder is being written or deleted, a marker file `step-<N>.partial`
exists next to it. It distinguishes what a killed process left, which is deleted, from a checkpoint that became corrupt
later, which is set aside.

Orbax's `AsyncCheckpointer` is used instead of its `CheckpointManager`: lmtrain has its own names and its own policies
for saving and keeping.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.checkpoint.arrays import ArrayWriter, count_bytes
from lmtrain.checkpoint.claim import TakenOverError
from lmtrain.checkpoint.config import CheckpointerConfig
from lmtrain.checkpoint.discovery import RUN_INFO, Checkpoint, list_checkpoints, list_set_aside, step_folder
from lmtrain.checkpoint.manifest import FileRecord, Manifest, record_files
from lmtrain.checkpoint.policies import Kind, decide, next_permanent_step
from lmtrain.checkpoint.run_folder import RunFolder
from lmtrain.checkpoint.staging import Staging
from lmtrain.checkpoint.verify import newest_intact
from lmtrain.config.errors import RunError, UserError
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.runtime.storage import check_writable, is_url, join, list_files, write_json

# Delay before a failed save is retried.
_RETRY_SECONDS = 60.0


class SaveError(RunError):
    """A checkpoint could not be saved, and the run must not continue without it."""


@dataclass
class _Save:
    """A save in progress. Its thread sets `problem` if it fails, else `seconds`: from its start to its manifest."""

    step: int
    kind: Kind
    began: float
    run_info: dict[str, Any]
    before_commit: Callable[[], None]
    best_step: int | None = None
    target: str = ""
    started: bool = False
    problem: Exception | None = None
    seconds: float = 0.0
    thread: threading.Thread = field(default_factory=threading.Thread)


class Checkpointer:
    """Saves checkpoints to the folder of one run, a path or URL, which is created and locked for this run.

    `clock` returns seconds and is monotonic. Several `processes` make the same calls in the same order. Raises
    `UserError` if the folder is not writable, so that the error comes at start-up and not at the first save.
    """

    def __init__(
        self,
        folder: str,
        config: CheckpointerConfig,
        processes: Processes = ALONE,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = folder if is_url(folder) else os.path.abspath(folder)
        self._config = config
        self._processes = processes
        self._clock = clock
        self._last_save = clock()
        self._retry_at: float | None = None
        self._owes_permanent = False  # a permanent checkpoint failed: the next successful save is permanent instead
        self._save: _Save | None = None
        self._saved: list[float] = []
        with _naming_the_setting(self.path):
            self._made = _make(self.path)
            self._folder = RunFolder(self.path) if processes.is_first else None
        gather(processes, "checkpoints", None)  # no process reads the folder before it is cleaned
        self._staging = Staging(self.path, config.staging_dir, processes)
        self._writer = ArrayWriter()

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint of the run, or None if it has no checkpoints; corrupt ones are set aside.

        Raises `UserError` if all are corrupt, instead of starting from scratch, so that they can still be recovered.
        """
        steps = gather(self._processes, "steps", [found.step for found in list_checkpoints(self.path)])[0]
        found = [Checkpoint(step, step_folder(self.path, step)) for step in steps]
        newest = newest_intact(found, self._config.verify_on_restore, self._processes, self._set_aside)
        damaged = gather(self._processes, "set aside", list_set_aside(self.path))[0]
        if newest is None and damaged:
            raise UserError(
                f"all checkpoints in {self.path} are corrupt: {', '.join(map(os.path.basename, damaged))}; restore "
                "one from a backup, or start a new run with another --trainer.id"
            )
        return newest

    @property
    def is_time(self) -> bool:
        """Whether a time-based checkpoint, or the retry of a failed one, is due by the clock of this process."""
        if self._retry_at is not None:
            return self._clock() >= self._retry_at
        interval = self._config.save_interval
        return interval is not None and self._clock() - self._last_save >= interval.total_seconds()

    @property
    def seconds_to_next(self) -> float | None:
        """Seconds until the next time-based checkpoint or the retry of a failed one; None if neither is scheduled."""
        interval, at = self._config.save_interval, self._retry_at
        if at is None and interval is not None:
            at = self._last_save + interval.total_seconds()
        return None if at is None else max(0.0, at - self._clock())

    def next_permanent(self, step: int, last: int) -> int:
        """The first step after `step` whose checkpoint is permanent."""
        return next_permanent_step(step, self._config.keep, last)

    def kind_at(self, step: int, *, last: bool, asked: bool) -> Kind | None:
        """The kind of checkpoint to save after `step` updates, None for no save. `asked`: by the clock or a signal."""
        kind = decide(step, self._config.keep, last=last, asked=asked)
        return Kind.PERMANENT if kind and self._owes_permanent else kind

    def save(
        self,
        step: int,
        kind: Kind,
        parts: Mapping[str, Any],
        run_info: dict[str, Any],
        before_commit: Callable[[], None] = lambda: None,
        best_step: int | None = None,
    ) -> float:
        """Copy the trees of arrays `parts` to the host, then write them in the background. Waits for the previous save.

        `before_commit` is called in the background before the checkpoint becomes complete. The temporary checkpoint of
        `best_step` is not deleted. Returns the seconds that the caller was blocked. A failed save is logged and
        retried, or ends the run: see `finish`.
        """
        began = self._clock()
        self.finish()
        save = self._save = _Save(step, kind, began, run_info | {"step": step}, before_commit, best_step)
        self._last_save = began
        self._retry_at = None
        self._begin(save, parts)
        save.thread = threading.Thread(target=self._commit, args=(save,), name=f"saving step {step}")
        save.thread.start()
        return self._clock() - began

    def take_saved(self) -> list[float]:
        """Durations in seconds, from start to manifest, of the saves completed since the last call."""
        if self._save is not None and not self._save.thread.is_alive():
            self.finish()
        saved, self._saved = self._saved, []
        return saved

    def finish(self, then: str = f"training continues, and saving is retried in {_RETRY_SECONDS:.0f} s") -> bool:
        """Wait for the save in progress. Returns False if it failed, and logs the error with what happens `then`.

        Raises `SaveError` if it failed and `on_save_error` is `stop`; and `TakenOverError`.
        """
        save, self._save = self._save, None
        if save is None:
            return True
        save.thread.join()
        if save.problem is None:
            log.info(f"saved {step_folder(self.path, save.step)}")
            self._saved.append(save.seconds)
            self._owes_permanent = self._owes_permanent and save.kind is not Kind.PERMANENT
            return True
        if isinstance(save.problem, TakenOverError):
            raise save.problem
        self._owes_permanent = self._owes_permanent or save.kind is Kind.PERMANENT
        self._renew_writer()
        text = f"the checkpoint of step {save.step} could not be saved: {save.problem}"
        if self._config.on_save_error == "stop":
            raise SaveError(f"{text} (trainer.checkpointer.on_save_error: stop)") from save.problem
        log.error(f"{text}; {then}")
        self._retry_at = self._clock() + _RETRY_SECONDS
        return False

    def save_now(self, step: int, kind: Kind, parts: Mapping[str, Any], run_info: dict[str, Any], **more: Any) -> float:
        """Save and block until it is complete. Raises `SaveError` if the retry fails too."""
        began = self._clock()
        for then in ("retrying now", "this was the second attempt"):
            self.save(step, kind, parts, run_info, **more)
            if self.finish(then):
                return self._clock() - began
        raise SaveError(
            f"the state after step {step} could not be saved, see above; run the same command again "
            "to resume from the last complete checkpoint"
        )

    def close(self) -> None:
        """Wait for the save in progress, and unlock the folder."""
        try:
            self.finish("the run is ending")
        finally:
            with suppress(Exception):  # it may raise the error of a failed save again, which is already logged
                self._writer.close()
            self.release()

    def release(self) -> None:
        """Unlock the folder, and delete the folders created for it if they are empty. No save is allowed after this."""
        if self._folder is not None:
            self._folder.release()
            with suppress(OSError):  # the folder is not empty
                for folder in self._made:
                    os.rmdir(folder)

    def _renew_writer(self) -> None:
        """Replace the writer after a failed save: Orbax keeps the error and would raise it in the next save."""
        with suppress(Exception):
            self._writer.close()
        self._writer = ArrayWriter()

    def _begin(self, save: _Save, parts: Mapping[str, Any]) -> None:
        """Copy the arrays and start writing, if all processes are able to."""
        try:
            if self._folder is not None:
                self._folder.begin(save.step)
                save.started = True
            save.target = self._staging.prepare(save.step, count_bytes(parts))
        except Exception as error:
            save.problem = error
        save.problem = self._agree("begin", save.problem)
        if save.problem is None:
            try:
                self._writer.start(save.target, parts)
            except Exception as error:
                save.problem = error

    def _commit(self, save: _Save) -> None:
        """In the background: wait for the writes, hash the files, write the manifest. Same outcome on all processes."""
        files: dict[str, FileRecord] = {}
        try:
            if save.problem is None:
                self._writer.wait()
                save.before_commit()
                files = self._record(save)
        except Exception as error:
            save.problem = error
        shares = gather(self._processes, "files", {name: [file.size, file.checksum] for name, file in files.items()})
        save.problem = self._agree("written", save.problem)
        try:
            if save.problem is None and self._folder is not None:
                records = {name: FileRecord(*file) for share in shares for name, file in share.items()}
                path = step_folder(self.path, save.step)
                write_json(join(path, RUN_INFO), save.run_info)
                records |= record_files(path, [RUN_INFO])
                self._folder.complete(Manifest(save.step, save.kind, time.time(), records), save.best_step)
        except Exception as error:
            save.problem = error
        save.problem = self._agree("complete", save.problem)
        self._staging.clear(save.target)
        taken_over = isinstance(save.problem, TakenOverError)
        if save.problem is not None and self._folder is not None and save.started and not taken_over:
            self._folder.discard(save.step)
        save.seconds = self._clock() - save.began

    def _record(self, save: _Save) -> dict[str, FileRecord]:
        """Sizes and checksums of this process's share of the files, which are uploaded if staged."""
        names = sorted(list_files(save.target))[self._processes.index :: self._processes.count]
        self._staging.upload(save.target, save.step, names)
        return record_files(save.target, names)

    def _agree(self, name: str, problem: Exception | None) -> Exception | None:
        """The error of this process, or else of another one; None if no process has one."""
        reported = gather(self._processes, name, None if problem is None else str(problem) or type(problem).__name__)
        others = [RuntimeError(f"process {index}: {text}") for index, text in enumerate(reported) if text]
        return problem or (others[0] if others else None)

    def _set_aside(self, checkpoint: Checkpoint, error: Exception) -> None:
        if self._folder is not None:
            log.error(f"{checkpoint.path} is corrupt: {error}")
            self._folder.move_away(checkpoint.path, "damaged")


def _make(folder: str) -> list[str]:
    """Create the folder; returns the folders that did not exist before, the innermost first."""
    if not is_url(folder):
        missing = [str(place) for place in (Path(folder), *Path(folder).parents) if not place.exists()]
        os.makedirs(folder, exist_ok=True)
        return missing
    try:
        check_writable(folder)
    except UserError as error:
        raise UserError(f"trainer.checkpointer.base_path: {error}") from None
    return []


@contextmanager
def _naming_the_setting(folder: str) -> Iterator[None]:
    """Convert errors of the file system to errors that name the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"trainer.checkpointer.base_path: {folder} cannot be used: {error.strerror or error}") from None
