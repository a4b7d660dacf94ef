"""One process at a time: a lock that ends with its process, however that ends."""

import contextlib
import errno
import fcntl
import os
import socket

# What file systems without locks answer.
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class FileLock:
    """A lock on the file `path`, which exists only while it is held or its holder has been killed."""

    def __init__(self, path: str):
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Take it if it is free. Also true where the file system has no locks."""
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
            os.close(descriptor)  # its holder removed it between our opening and our locking

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def holder(self) -> str:
        """Who has it, in words."""
        try:
            with open(self.path, encoding="utf-8") as file:
                return file.read().strip() or "another process"
        except FileNotFoundError:
            return "another process"

    def release(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # someone may have deleted the folder, or put a file in its place
                os.unlink(self.path)
            os.close(self._descriptor)
            self._descriptor = None
