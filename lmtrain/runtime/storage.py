"""Files at paths and URLs alike: everything a user can name with `gs://`, `s3://`, `https://`, `memory://`, or a path.

A file is there whole or not at all: local ones are renamed into place, and object stores show an object only when its
upload is complete.
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
    """Whether it is a URL and not a path."""
    return "://" in path


def join(folder: str, *names: str) -> str:
    """`folder/name/...`, for URLs and, with `~` replaced, for local paths."""
    base = folder.rstrip("/") if is_url(folder) else os.path.expanduser(folder)
    return "/".join([base, *names]) if is_url(folder) else os.path.join(base, *names)


def read_bytes(path: str) -> bytes:
    """Raises FileNotFoundError if there is no such file."""
    if not is_url(path):
        with open(path, "rb") as file:
            return file.read()
    with told(path, "read", missing_too=False):
        fs, inside = open_fs(path)
        content: bytes = fs.cat_file(inside)
        return content


def write_bytes(path: str, content: bytes) -> None:
    """Write a file whole or not at all."""
    if not is_url(path):
        write_atomically(path, content)
        return
    with told(path, "written"):
        fs, inside = open_fs(path)
        fs.pipe_file(inside, content)


def read_json(path: str) -> Any:
    """Raises FileNotFoundError, and ValueError for what is not JSON."""
    return json.loads(read_bytes(path))


def write_json(path: str, value: Any) -> None:
    """Indented JSON with sorted keys: same value, same bytes."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def list_names(folder: str) -> list[str]:
    """Names of the files in a folder, sorted; none if there is no such folder."""
    try:
        if not is_url(folder):
            return sorted(os.listdir(folder))
        with told(folder, "listed", missing_too=False):
            fs, inside = open_fs(folder)
            return sorted(entry.rstrip("/").rpartition("/")[2] for entry in fs.ls(inside, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def file_size(path: str) -> int | None:
    """Bytes of a file, None if there is none."""
    try:
        if not is_url(path):
            return os.path.getsize(path) if os.path.isfile(path) else None
        with told(path, "read", missing_too=False):
            fs, inside = open_fs(path)
            return int(fs.info(inside)["size"])
    except FileNotFoundError:
        return None


def upload(local: str, path: str) -> None:
    """Put a local file at `path`, whole or not at all."""
    with told(path, "written"):
        fs, inside = open_fs(path)
        fs.put_file(local, inside)


def download(path: str, local: str) -> None:
    """Copy `path` to a local file. Not atomic: the caller renames.

    Raises FileNotFoundError if there is no such file, and OSError if the local one cannot be written.
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
    """Raise `UserError` if nothing can be written to the URL `folder`: better now than after hours of work."""
    probe = join(folder, ".writable")
    write_bytes(probe, b"?")
    with told(folder, "written"):
        fs, inside = open_fs(probe)
        fs.rm_file(inside)


def list_files(folder: str) -> dict[str, int]:
    """Every file below a folder, by its path from there, with its bytes; none if there is no such folder."""
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
    """The content in blocks, the last one shorter. Raises FileNotFoundError if there is no such file."""
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
    """Delete a folder and all below it; no error if there is none."""
    if not is_url(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        return
    with told(folder, "deleted"):
        fs, inside = open_fs(folder)
        if fs.exists(inside):
            fs.rm(inside, recursive=True)


def delete_file(path: str) -> None:
    """Delete a file; no error if there is none."""
    with contextlib.suppress(FileNotFoundError):
        if not is_url(path):
            os.remove(path)
            return
        with told(path, "deleted", missing_too=False):
            fs, inside = open_fs(path)
            fs.rm_file(inside)


def rename_folder(folder: str, new: str) -> None:
    """Give a folder another name; at a URL file by file, which takes time."""
    if not is_url(folder):
        os.rename(folder, new)
        return
    with told(folder, "renamed"):
        fs, inside = open_fs(folder)
        target = open_fs(new)[1]
        for name in fs.find(inside):  # not fs.mv, which copies the folders too that there are none of
            fs.cp_file(name, target + name[len(inside) :])
        fs.rm(inside, recursive=True)
