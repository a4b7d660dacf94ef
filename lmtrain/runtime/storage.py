"""File operations for local paths and URLs (`gs://`, `s3://`, `https://`, `memory://`).

Writes are atomic: local files are renamed into place, and object stores show an object only when its upload is
complete.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lmtrain.config.errors import UserError
from lmtrain.config.json_text import parse_json
from lmtrain.config.remote import open_fs, remote_errors
from lmtrain.runtime.atomic_files import write_atomically
from lmtrain.runtime.logging import log

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
    raise UserError(
        f"{path}: cannot be read reliably: {_MAX_READS} reads returned different contents; check the network"
    )


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
