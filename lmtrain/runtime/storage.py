"""File operations for local paths and URLs (`gs://`, `s3://`, `https://`, `memory://`).

Writes are atomic: local files are renamed into place, and object stores show an object only when its upload is
complete.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

from lmtrain.config.remote import open_fs, told
from lmtrain.runtime.atomic_files import write_atomically

_CHUNK_BYTES = 1 << 22


def is_url(path: str) -> bool:
    """Whether `path` is a URL and not a local path."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """`folder/name/...`, for URLs and, with `~` replaced, for local paths."""
    base = folder.rstrip("/") if is_url(folder) else os.path.expanduser(folder)
    return "/".join([base, *names]) if is_url(folder) else os.path.join(base, *names)


def read_bytes(path: str) -> bytes:
    """Content of a file. Raises FileNotFoundError if it is missing."""
    if not is_url(path):
        with open(path, "rb") as file:
            return file.read()
    with told(path, "read", missing_too=False):
        fs, inside = open_fs(path)
        content: bytes = fs.cat_file(inside)
        return content


def write_bytes(path: str, content: bytes) -> None:
    """Write a file atomically."""
    if not is_url(path):
        write_atomically(path, content)
        return
    with told(path, "written"):
        fs, inside = open_fs(path)
        fs.pipe_file(inside, content)


def read_json(path: str) -> Any:
    """Content of a JSON file. Raises FileNotFoundError if it is missing, ValueError if it is not JSON."""
    return json.loads(read_bytes(path))


def write_json(path: str, value: Any) -> None:
    """Write indented JSON with sorted keys: equal values give equal bytes."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def list_names(folder: str) -> list[str]:
    """Sorted names of the files and folders in a folder; empty if the folder is missing."""
    try:
        if not is_url(folder):
            return sorted(os.listdir(folder))
        with told(folder, "listed", missing_too=False):
            fs, inside = open_fs(folder)
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(inside, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_size(path: str) -> int | None:
    """Size of a file in bytes, None if it is missing."""
    try:
        if not is_url(path):
            return os.path.getsize(path) if os.path.isfile(path) else None
        with told(path, "read", missing_too=False):
            fs, inside = open_fs(path)
            return int(fs.info(inside)["size"])
    except FileNotFoundError:
        return None


def upload(local: str, path: str) -> None:
    """Upload a local file to `path`, atomically."""
    with told(path, "written"):
        fs, inside = open_fs(path)
        fs.put_file(local, inside)


def download(path: str, local: str) -> None:
    """Copy `path` to a local file. Not atomic: the caller has to rename it.

    Raises FileNotFoundError if `path` is missing, and OSError if the local file cannot be written.
    """
    with told(path, "read", missing_too=False):
        fs, inside = open_fs(path)
        source = fs.open(inside, "rb")
    with source, open(local, "wb") as target:
        while True:
            with told(path, "read", missing_too=False):
                chunk = source.read(_CHUNK_BYTES)
            if not chunk:
                return
            target.write(chunk)


def check_writable(folder: str) -> None:
    """Raise `UserError` if the URL `folder` is not writable, so that the error comes at start-up."""
    probe = join(folder, ".writable")
    write_bytes(probe, b"?")
    with told(folder, "written"):
        fs, inside = open_fs(probe)
        fs.rm_file(inside)


def list_files(folder: str) -> dict[str, int]:
    """All files below a folder: relative path -> size in bytes; empty if the folder is missing."""
    if not is_url(folder):
        found = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
        return {os.path.relpath(path, folder): os.path.getsize(path) for path in sorted(found)}
    try:
        with told(folder, "listed", missing_too=False):
            fs, inside = open_fs(folder)
            below = fs.find(inside, detail=True)
    except FileNotFoundError:
        return {}
    start = len(inside.strip("/")) + 1
    return {name.strip("/")[start:]: int(info["size"]) for name, info in sorted(below.items())}


def read_blocks(path: str, block_bytes: int) -> Iterator[bytes]:
    """Content of a file in blocks; the last one may be shorter. Raises FileNotFoundError if it is missing."""
    if not is_url(path):
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(block_bytes), b"")
        return
    with told(path, "read", missing_too=False):
        fs, inside = open_fs(path)
        source = fs.open(inside, "rb", block_size=block_bytes)
    with source:
        while True:
            with told(path, "read", missing_too=False):
                block = source.read(block_bytes)
            if not block:
                return
            yield block


def delete_folder(folder: str) -> None:
    """Delete a folder and everything below it; no error if it is missing."""
    if not is_url(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        return
    with told(folder, "deleted"):
        fs, inside = open_fs(folder)
        if fs.exists(inside):
            fs.rm(inside, recursive=True)


def delete_file(path: str) -> None:
    """Delete a file; no error if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        if not is_url(path):
            os.remove(path)
            return
        with told(path, "deleted", missing_too=False):
            fs, inside = open_fs(path)
            fs.rm_file(inside)


def rename_folder(folder: str, new: str) -> None:
    """Rename a folder; at a URL each file is copied, which takes time."""
    if not is_url(folder):
        os.rename(folder, new)
        return
    with told(folder, "renamed"):
        fs, inside = open_fs(folder)
        target = open_fs(new)[1]
        for name in fs.find(inside):  # not fs.mv, which also tries to copy folders, which object stores do not have
            fs.cp_file(name, target + name[len(inside) :])
        fs.rm(inside, recursive=True)
