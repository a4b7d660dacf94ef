"""That one run of an id saves at a time.

On a local disk a lock, which ends with its process, makes a second run of the same id refuse to start. Where there are
no locks, the newest start wins: it leaves its mark, and an older one that finds the mark changed must not save again.
"""

import contextlib
import os
import socket
import time
import uuid
from typing import Any

from lmtrain.config.errors import RunError, UserError
from lmtrain.runtime.lock import FileLock
from lmtrain.runtime.storage import delete_file, is_url, join, read_json, write_json

_LOCK = "lock"
_MARK = "attempt.json"


class TakenOverError(RunError):
    """Another process has started the same run since; this one must not save any more."""


class Claim:
    """One process's right to save into `folder`. Raises `UserError` if another one has it."""

    def __init__(self, folder: str):
        self._folder = folder
        self._lock = None if is_url(folder) else FileLock(os.path.join(folder, _LOCK))
        if self._lock is not None and not self._lock.acquire():
            raise UserError(
                f"{folder}: locked by another run with the same id ({self._lock.holder()}); wait for its end, "
                "or give this one another --trainer.id"
            )
        self._id = uuid.uuid4().hex
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        mark = {"id": self._id, "host": socket.gethostname(), "process": os.getpid(), "started": started}
        write_json(join(folder, _MARK), mark)

    def check(self) -> None:
        """Raise `TakenOverError` if a newer start has left its mark."""
        mark = self._mark()
        if mark.get("id", self._id) != self._id:
            raise TakenOverError(
                f"{self._folder}: the same run was started again at {mark.get('started')} on {mark.get('host')} "
                f"(process {mark.get('process')}); this older one ends without saving"
            )

    def release(self) -> None:
        """Give it back; done twice, it has no effect."""
        with contextlib.suppress(OSError, UserError):  # a mark that stays does no harm
            if self._mark().get("id") == self._id:
                delete_file(join(self._folder, _MARK))
        if self._lock is not None:
            self._lock.release()

    def _mark(self) -> dict[str, Any]:
        """What is there now; empty if there is nothing that can be read as a mark."""
        try:
            mark = read_json(join(self._folder, _MARK))
        except UserError:  # the store does not answer: that says nothing of a mark
            raise
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return mark if isinstance(mark, dict) else {}
