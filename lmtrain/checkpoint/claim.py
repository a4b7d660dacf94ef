"""Exclusive access to a run's checkpoints: only one run with the same id saves at a time.

On a local disk, a lock that ends with its process makes a second run with the same id refuse to start. Where locks are
unsupported, the newest start wins: it writes a marker file, and an older run that finds another marker stops saving.
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
