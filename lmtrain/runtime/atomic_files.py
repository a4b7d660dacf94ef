"""Atomic writes of local files."""

import contextlib
import hashlib
import os
import shutil
import time

# The age of a temporary file that no process writes any more. Its name says less: a process of another host that shares
# the folder, or of another container, may have the same id.
UNUSED_SECONDS = 86400.0


def write_atomically(path: str, content: bytes, durable: bool = True) -> None:
    """Write a temporary file in the same folder, flush it to disk if `durable`, and rename it to `path`."""
    temporary = f"{path}.tmp-{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def file_sha256(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_temporaries(folder: str, of: str = "", age: float | None = None) -> None:
    """Delete temporary files and folders of killed writers: all in the folder, or only those of the file called `of`.

    `age`: only those that have not changed for this number of seconds, for a folder to which others may write now.
    """
    with contextlib.suppress(FileNotFoundError):  # the folder may have been deleted
        for name in os.listdir(folder):
            if name.startswith(of) and ".tmp-" in name[len(of) :]:
                _remove(os.path.join(folder, name), age)


def _remove(path: str, age: float | None) -> None:
    if age is None:
        os.remove(path)
        return
    with contextlib.suppress(OSError):  # another process was faster, or it is not ours to remove
        if time.time() - os.lstat(path).st_mtime > age:
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.remove(path)
