"""Atomic writes of local files."""

import contextlib
import hashlib
import os


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


def remove_temporaries(folder: str, of: str = "") -> None:
    """Delete temporary files of killed writers: all in the folder, or only those of the file called `of`."""
    with contextlib.suppress(FileNotFoundError):  # the folder may have been deleted
        for name in os.listdir(folder):
            if name.startswith(of) and ".tmp-" in name[len(of) :]:
                os.remove(os.path.join(folder, name))
