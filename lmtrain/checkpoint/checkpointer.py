"""Saving training state in the background.

A checkpoint is a folder `step-<N>`: the arrays `params`, `optimizer`, perhaps `average`; `run.json`; and last of all
`manifest.json`. While it is being written or deleted `step-<N>.partial` stands beside it, so that what a killed process
left can be told from a checkpoint that was damaged later: the one is deleted, the other set aside.

Orbax's `AsyncCheckpointer` is used rather than its `CheckpointManager`: names, what to keep and when to save are ours.
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

# After a save that failed, the next is tried no sooner.
_RETRY_SECONDS = 60.0


class SaveError(RunError):
    """A checkpoint could not be saved, and the run is not to go on without."""


@dataclass
class _Save:
    """A save under way. Its thread sets `problem` if it fails, else `seconds`: from its beginning to its manifest."""

    step: int
    kind: Kind
    began: float
    run_info: dict[str, Any]
    before_commit: Callable[[], None]
    target: str = ""
    begun: bool = False
    problem: Exception | None = None
    seconds: float = 0.0
    thread: threading.Thread = field(default_factory=threading.Thread)


class Checkpointer:
    """Saves into one run's folder, a path or URL, which is made and claimed for this run.

    `clock` gives seconds and never runs backwards. Several `processes` make the same calls in the same order. Raises
    `UserError` if nothing can be saved there: better now than at the first save.
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
        self._owes_permanent = False  # one could not be saved: the next that can takes its place
        self._save: _Save | None = None
        self._saved: list[float] = []
        with _told(self.path):
            self._made = _make(self.path)
            self._folder = RunFolder(self.path) if processes.is_first else None
        gather(processes, "checkpoints", None)  # nobody looks before all is in order
        self._staging = Staging(self.path, config.staging_dir, processes)
        self._writer = ArrayWriter()

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint of the run that verifies, None if it has none; damaged ones are set aside.

        Raises `UserError` if all are damaged: a run that began anew would bury what can still be saved from them.
        """
        steps = gather(self._processes, "steps", [found.step for found in list_checkpoints(self.path)])[0]
        found = [Checkpoint(step, step_folder(self.path, step)) for step in steps]
        newest = newest_intact(found, self._config.verify_on_restore, self._processes, self._set_aside)
        damaged = gather(self._processes, "set aside", list_set_aside(self.path))[0]
        if newest is None and damaged:
            raise UserError(
                f"no checkpoint in {self.path} is valid: {', '.join(map(os.path.basename, damaged))}. Restore "
                "one from a backup, or start a new run with another --trainer.id"
            )
        return newest

    @property
    def is_time(self) -> bool:
        """Whether the clock of this process asks for a checkpoint, or for another try of one that failed."""
        if self._retry_at is not None:
            return self._clock() >= self._retry_at
        interval = self._config.save_interval
        return interval is not None and self._clock() - self._last_save >= interval.total_seconds()

    @property
    def seconds_to_next(self) -> float | None:
        """Until the clock asks for a checkpoint, or for another try of one that failed; None if it never does."""
        interval, at = self._config.save_interval, self._retry_at
        if at is None and interval is not None:
            at = self._last_save + interval.total_seconds()
        return None if at is None else max(0.0, at - self._clock())

    def next_permanent(self, step: int, last: int) -> int:
        """The first step after `step` whose checkpoint is permanent."""
        return next_permanent_step(step, self._config.keep, last)

    def kind_at(self, step: int, *, last: bool, asked: bool) -> Kind | None:
        """The kind of checkpoint to save after `step` updates, None for no save. `asked`: by the clock, or a signal."""
        kind = decide(step, self._config.keep, last=last, asked=asked)
        return Kind.PERMANENT if kind and self._owes_permanent else kind

    def save(
        self,
        step: int,
        kind: Kind,
        parts: Mapping[str, Any],
        run_info: dict[str, Any],
        before_commit: Callable[[], None] = lambda: None,
    ) -> float:
        """Copy the trees of arrays `parts` to the host, then write them behind. Waits for the save before it.

        `before_commit` is called in the background before the checkpoint becomes complete. Returns the seconds that
        the caller had to wait. A save that fails is told in the log and tried again, or ends the run: see `finish`.
        """
        began = self._clock()
        self.finish()
        save = self._save = _Save(step, kind, began, run_info | {"step": step}, before_commit)
        self._last_save = began
        self._retry_at = None
        self._begin(save, parts)
        save.thread = threading.Thread(target=self._commit, args=(save,), name=f"saving step {step}")
        save.thread.start()
        return self._clock() - began

    def take_saved(self) -> list[float]:
        """The seconds of the saves that have become complete since the last question, from beginning to manifest."""
        if self._save is not None and not self._save.thread.is_alive():
            self.finish()
        saved, self._saved = self._saved, []
        return saved

    def finish(self, then: str = f"training continues, and saving is retried in {_RETRY_SECONDS:.0f} s") -> bool:
        """Wait for the save under way. False if it failed, which is told with what happens `then`.

        Raises `SaveError` if it failed and `on_save_error` is `stop`, and `TakenOverError`.
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
        """Save and wait for it: training does not go on. Raises `SaveError` if a second try fails too."""
        began = self._clock()
        for then in ("trying again now", "that was the second try"):
            self.save(step, kind, parts, run_info, **more)
            if self.finish(then):
                return self._clock() - began
        raise SaveError(
            f"the state after step {step} could not be saved, see above; run the same command again "
            "to resume from the last complete checkpoint"
        )

    def close(self) -> None:
        """Finish, and let others claim the folder."""
        try:
            self.finish("the run is ending")
        finally:
            with suppress(Exception):  # what it may still hold of a save that failed has been told
                self._writer.close()
            self.release()

    def release(self) -> None:
        """Let others claim the folder; nothing may be saved any more. What was made for nothing goes."""
        if self._folder is not None:
            self._folder.release()
            with suppress(OSError):  # which says that there is something in it
                for folder in self._made:
                    os.rmdir(folder)

    def _renew_writer(self) -> None:
        """Orbax's keeps what went wrong, and would fail the next save with it."""
        with suppress(Exception):
            self._writer.close()
        self._writer = ArrayWriter()

    def _begin(self, save: _Save, parts: Mapping[str, Any]) -> None:
        """Copy, and start to write: if all processes can."""
        try:
            if self._folder is not None:
                self._folder.begin(save.step)
                save.begun = True
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
        """In the background: wait until all is written, hash it, and write the manifest. All processes end alike."""
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
                self._folder.complete(Manifest(save.step, save.kind, time.time(), records))
        except Exception as error:
            save.problem = error
        save.problem = self._agree("complete", save.problem)
        self._staging.clear(save.target)
        taken_over = isinstance(save.problem, TakenOverError)
        if save.problem is not None and self._folder is not None and save.begun and not taken_over:
            self._folder.discard(save.step)
        save.seconds = self._clock() - save.began

    def _record(self, save: _Save) -> dict[str, FileRecord]:
        """This process's share of the files, uploaded where that is needed."""
        names = sorted(list_files(save.target))[self._processes.index :: self._processes.count]
        self._staging.upload(save.target, save.step, names)
        return record_files(save.target, names)

    def _agree(self, name: str, problem: Exception | None) -> Exception | None:
        """This process's problem or that of another; None if none has one."""
        told = gather(self._processes, name, None if problem is None else str(problem) or type(problem).__name__)
        others = [RuntimeError(f"process {index}: {text}") for index, text in enumerate(told) if text]
        return problem or (others[0] if others else None)

    def _set_aside(self, checkpoint: Checkpoint, error: Exception) -> None:
        if self._folder is not None:
            log.error(f"{checkpoint.path} is damaged: {error}")
            self._folder.move_away(checkpoint.path, "damaged")


def _make(folder: str) -> list[str]:
    """Make the folder; returns those that were not there before, the innermost first."""
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
def _told(folder: str) -> Iterator[None]:
    """Errors of the file system as ones that name the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"trainer.checkpointer.base_path: {folder} cannot be used: {error.strerror or error}") from None
