"""File lock that is released when its process ends, for any reason."""

import contextlib
import errno
import fcntl
import os
import socket

# Error codes of file systems without locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class FileLock:
    """A lock on the file `path`. The file exists while the lock is held, and after its holder was killed."""

    def __init__(self, path: str):
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Acquire the lock if it is free; returns whether it did. Always True if the file system has no locks."""
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
            if self._is_current(descriptor):
                self._descriptor = descriptor
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
                return True
            os.close(descriptor)  # the previous holder deleted the file after it was opened here: open it again

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def holder(self) -> str:
        """The process that holds the lock, as text for a message."""
        try:
            with open(self.path, encoding="utf-8") as file:
                return file.read().strip() or "another process"
        except FileNotFoundError:
            return "another process"

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the folder may have been deleted or replaced by a file
                os.unlink(self.path)
            os.close(self._descriptor)
            self._descriptor = None
