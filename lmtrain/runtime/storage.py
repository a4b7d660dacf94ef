"""File operations for local paths and URLs (`gs://`, `s3://`, `https://`, `memory://`): atomic writes, locks, paths of
a run.

Writes are atomic: local files are renamed into place, and object stores show an object only when its upload is
complete.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.remote import open_fs, remote_errors
from lmtrain.runtime.text import parse_json

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


T = TypeVar("T")

_CHUNK_BYTES = 1 << 22
# Reads of a file until two are the same. Of files with checksums, 1 of 10 is garbled on a bad network.
_MAX_READS = 8


def is_url(path: str) -> bool:
    """Whether `path` is a URL and not a local path."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """`folder/name/...`, for URLs and, with `~` replaced, for local paths."""
    base = folder.rstrip("/") if is_url(folder) else os.path.expanduser(folder)
    return "/".join([base, *names]) if is_url(folder) else os.path.join(base, *names)


@contextlib.contextmanager
def _remote(url: str, doing: str, missing_too: bool = True) -> Iterator[tuple[Any, str]]:
    """The file system of a URL and the path in it. Errors of the file system become those of `remote_errors`."""
    with remote_errors(url, doing, missing_too):
        yield open_fs(url)


def read_bytes(path: str) -> bytes:
    """Content of a file. Raises FileNotFoundError if it is missing."""
    if not is_url(path):
        with open(path, "rb") as file:
            return file.read()
    with _remote(path, "read", missing_too=False) as (fs, inside):
        content: bytes = fs.cat_file(inside)
        return content


def write_bytes(path: str, content: bytes) -> None:
    """Write a file atomically."""
    if not is_url(path):
        write_atomically(path, content)
        return
    with _remote(path, "written") as (fs, inside):
        fs.pipe_file(inside, content)


def read_json(path: str) -> Any:
    """Content of a JSON file. Raises FileNotFoundError if it is missing, ValueError if it is not JSON."""
    return parse_json(read_reliably(path, lambda: read_bytes(path), _is_json))


def _is_json(content: bytes) -> bool:
    try:
        parse_json(content)
    except ValueError:
        return False
    return True


def read_reliably(path: str, read: Callable[[], T], is_valid: Callable[[T], bool]) -> T:
    """What `read` returns of the file `path` once it is valid, or once two reads return the same.

    A network may change some bytes of an answer: so a file is corrupt only if it is read twice in the same way. Raises
    `UserError` if all reads differ.
    """
    seen: list[T] = []
    for _ in range(_MAX_READS):
        content = read()
        if is_valid(content) or content in seen:
            return content
        seen.append(content)
        log.warning(f"{path}: invalid content, reading it again")
    raise UserError(f"{path}: cannot be read reliably: {_MAX_READS} reads differ; check the network")


def write_json(path: str, value: Any) -> None:
    """Write indented JSON with sorted keys: equal values give equal bytes."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def list_names(folder: str) -> list[str]:
    """Sorted names of the files and folders in a folder; empty if the folder is missing."""
    try:
        if not is_url(folder):
            return sorted(os.listdir(folder))
        with _remote(folder, "listed", missing_too=False) as (fs, inside):
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(inside, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_size(path: str) -> int | None:
    """Size of a file in bytes, None if it is missing."""
    try:
        if not is_url(path):
            return os.path.getsize(path) if os.path.isfile(path) else None
        with _remote(path, "read", missing_too=False) as (fs, inside):
            return int(fs.info(inside)["size"])
    except FileNotFoundError:
        return None


def upload(local: str, path: str) -> None:
    """Upload a local file to `path`, atomically."""
    with _remote(path, "written") as (fs, inside):
        fs.put_file(local, inside)


def download(path: str, local: str) -> None:
    """Copy `path` to a local file. Not atomic: the caller has to rename it.

    Raises FileNotFoundError if `path` is missing, and OSError if the local file cannot be written.
    """
    with _remote(path, "read", missing_too=False) as (fs, inside):
        source = fs.open(inside, "rb")
    with source, open(local, "wb") as target:
        while True:
            with remote_errors(path, "read", missing_too=False):
                chunk = source.read(_CHUNK_BYTES)
            if not chunk:
                return
            target.write(chunk)


def check_writable(folder: str) -> None:
    """Raise `UserError` if the URL `folder` is not writable, so that the error comes at start-up."""
    probe = join(folder, ".writable")
    write_bytes(probe, b"?")
    delete_file(probe)


def list_files(folder: str) -> dict[str, int]:
    """All files below a folder: relative path -> size in bytes; empty if the folder is missing."""
    if not is_url(folder):
        paths = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        return {os.path.relpath(path, folder): os.path.getsize(path) for path in sorted(paths)}
    try:
        with _remote(folder, "listed", missing_too=False) as (fs, inside):
            below = fs.find(inside, detail=True)
    except FileNotFoundError:
        return {}
    start = len(inside.strip("/")) + 1
    return {name.strip("/")[start:]: int(info["size"]) for name, info in sorted(below.items())}


def read_range(path: str, start: int, end: int) -> bytes:
    """The bytes of a file from `start` up to `end` or its end. At a URL this is one request."""
    if not is_url(path):
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(end - start)
    with _remote(path, "read", missing_too=False) as (fs, inside):
        content: bytes = fs.cat_file(inside, start=start, end=end)
        return content


def delete_folder(folder: str) -> None:
    """Delete a folder and everything below it; no error if it is missing."""
    if not is_url(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        return
    # repeated requests, whose first answers were lost, do not find the files
    with contextlib.suppress(FileNotFoundError), _remote(folder, "deleted", missing_too=False) as (fs, inside):
        if fs.exists(inside):
            fs.rm(inside, recursive=True)


def delete_file(path: str) -> None:
    """Delete a file; no error if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        if not is_url(path):
            os.remove(path)
            return
        with _remote(path, "deleted", missing_too=False) as (fs, inside):
            fs.rm_file(inside)


def rename_folder(folder: str, new: str) -> None:
    """Rename a folder; at a URL each file is copied, which takes time."""
    if not is_url(folder):
        os.rename(folder, new)
        return
    with _remote(folder, "renamed") as (fs, inside):
        target = open_fs(new)[1]
        for name in fs.find(inside):  # not fs.mv, which also tries to copy folders, which object stores do not have
            fs.cp_file(name, target + name[len(inside) :])
    delete_folder(folder)


def fill_run_id(path: str, run: str) -> str:
    """`path` with `~` and a literal ${run_id} replaced."""
    return os.path.expanduser(path).replace("${run_id}", run)


def run_path(base: str, run: str) -> str:
    """`<base>/<run_id>`; a literal ${run_id} in `base` is replaced instead, and nothing is appended."""
    filled = fill_run_id(base, run)
    return filled if "${run_id}" in base else f"{filled.rstrip('/')}/{run}"
