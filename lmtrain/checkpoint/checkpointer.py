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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lmtrain.checkpoint.arrays import ArrayWriter, count_bytes
from lmtrain.checkpoint.config import CheckpointerConfig, Kind, decide, next_permanent_step
from lmtrain.checkpoint.discovery import RUN_INFO, Checkpoint, list_checkpoints, list_set_aside, step_folder
from lmtrain.checkpoint.manifest import FileRecord, Manifest, record_files
from lmtrain.checkpoint.run_folder import RunFolder, TakenOverError, create_folder, naming_the_setting
from lmtrain.checkpoint.staging import Staging
from lmtrain.checkpoint.verify import newest_intact
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.errors import RunError, UserError
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.runtime.storage import is_url, join, list_files, write_json

T = TypeVar("T")

# Delay before a failed save is retried.
_RETRY_SECONDS = 60.0


class SaveError(RunError):
    """A checkpoint could not be saved, and the run must not continue without it."""


@dataclass(kw_only=True)
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
        with naming_the_setting(self.path):
            self._made = create_folder(self.path)
            self._folder = RunFolder(self.path) if processes.is_first else None
        gather(processes, "checkpoints", None)  # no process reads the folder before it is cleaned
        self._staging = Staging(self.path, config.staging_dir, processes)
        self._writer = ArrayWriter()

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint of the run, or None if it has no checkpoints; corrupt ones are set aside.

        Raises `UserError` if all are corrupt, instead of starting from scratch, so that they can still be recovered.
        """
        listed = [checkpoint.step for checkpoint in list_checkpoints(self.path)]
        steps = gather(self._processes, "steps", listed)[0]
        checkpoints = [Checkpoint(step, step_folder(self.path, step)) for step in steps]
        newest, corrupt = newest_intact(checkpoints, self._config.verify_on_restore, self._processes)
        if self._folder is not None:
            for checkpoint in corrupt:
                self._folder.move_away(checkpoint.path, "damaged")
        damaged = gather(self._processes, "set aside", list_set_aside(self.path))[0]
        if newest is None and damaged:
            raise UserError(
                f"all checkpoints in {self.path} are corrupt: {', '.join(map(os.path.basename, damaged))}; restore "
                "one from a backup, or start a new run with another --trainer.id"
            )
        return newest

    @property
    def seconds_to_next(self) -> float | None:
        """Seconds until the next time-based checkpoint or the retry of a failed one; None if neither is scheduled."""
        interval, at = self._config.save_interval, self._retry_at
        if at is None and interval is not None:
            at = self._last_save + interval.total_seconds()
        return None if at is None else max(0.0, at - self._clock())

    @property
    def is_due(self) -> bool:
        """Whether a time-based checkpoint, or the retry of a failed one, is due by the clock of the first process."""
        return self._processes.is_first and self.seconds_to_next == 0

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
        save = self._save = _Save(
            step=step,
            kind=kind,
            began=began,
            run_info=run_info | {"step": step},
            before_commit=before_commit,
            best_step=best_step,
        )
        self._last_save = began
        self._retry_at = None
        try:
            self._start(save, parts)
        except Exception as error:
            save.problem = error
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

    def _start(self, save: _Save, parts: Mapping[str, Any]) -> None:
        """Copy the arrays and start writing, if all processes are able to."""

        def prepare() -> str:
            if self._folder is not None:
                self._folder.begin(save.step)
                save.started = True
            return self._staging.prepare(save.step, count_bytes(parts))

        save.target = self._together("begin", prepare)
        self._writer.start(save.target, parts)

    def _commit(self, save: _Save) -> None:
        """In the background: wait for the writes, hash the files, write the manifest. Same outcome on all processes."""
        try:
            files = self._together("written", lambda: self._write(save))
            shares = gather(self._processes, "files", files)
            self._together("complete", lambda: self._complete(save, shares))
        except Exception as error:
            save.problem = error
            if self._folder is not None and save.started and not isinstance(error, TakenOverError):
                self._folder.discard(save.step)
        self._staging.clear(save.target)
        save.seconds = self._clock() - save.began

    def _write(self, save: _Save) -> dict[str, FileRecord]:
        """Sizes and checksums of this process's share of the written files, which are uploaded if staged."""
        if save.problem is not None:  # it could not be started
            raise save.problem
        self._writer.wait()
        save.before_commit()
        names = sorted(list_files(save.target))[self._processes.index :: self._processes.count]
        self._staging.upload(save.target, save.step, names)
        return record_files(save.target, names)

    def _complete(self, save: _Save, shares: Sequence[Mapping[str, Sequence[Any]]]) -> None:
        """In the first process: write the run info and the manifest, with the records of all processes."""
        if self._folder is None:
            return
        records = {name: FileRecord(*record) for share in shares for name, record in share.items()}
        path = step_folder(self.path, save.step)
        write_json(join(path, RUN_INFO), save.run_info)
        records |= record_files(path, [RUN_INFO])
        self._folder.complete(
            Manifest(step=save.step, kind=save.kind, saved=time.time(), files=records), save.best_step
        )

    def _together(self, name: str, work: Callable[[], T]) -> T:
        """The result of `work` in this process. Raises in all processes if it failed in one of them."""
        problem = None
        try:
            result = work()
        except Exception as error:
            problem = error
        reported = gather(self._processes, name, None if problem is None else str(problem) or type(problem).__name__)
        if problem is not None:
            raise problem
        for index, text in enumerate(reported):
            if text:
                raise RuntimeError(f"process {index}: {text}")
        return result
