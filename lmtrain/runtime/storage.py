"""Files at paths and URLs alike: everything a user can name with `gs://`, `s3://`, `https://`, `memory://`, or a path.

A file is there whole or not at all: local ones are renamed into place, and object stores show an object only when its
upload is complete.
"""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from lmtrain.config.errors import UserError
from lmtrain.runtime.files import write_atomically

_CHUNK_BYTES = 1 << 22

_ADVICE = {
    "gs": "for private buckets run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "for private buckets set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; AWS_ENDPOINT_URL for "
    "stores that are not Amazon's",
}

# It logs the traceback of whatever it raises, and a warning with every request where it may not look at a bucket.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def is_url(path: str) -> bool:
    return "://" in path


def join(folder: str, *names: str) -> str:
    """`folder/name/...`, for URLs and, with `~` replaced, for local paths."""
    base = folder.rstrip("/") if is_url(folder) else os.path.expanduser(folder)
    return "/".join([base, *names]) if is_url(folder) else os.path.join(base, *names)


def open_fs(path: str) -> tuple[Any, str]:
    """fsspec's file system of a path, and the path within it. Raises `UserError` if there is no such kind."""
    try:
        fs, inside = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: {error}") from None
    fs.invalidate_cache()  # of listings: other processes write too, and what a listing lacks is not looked for
    return fs, inside


@contextmanager
def told(path: str, doing: str, missing_too: bool = True) -> Iterator[None]:
    """Turns what a remote file system raises into a `UserError` that names the path; without `missing_too` a missing
    file stays an error of its own. Each library has its own kinds of error, and some raise bare ones, so all are
    caught."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        missing = isinstance(error, FileNotFoundError)
        if (missing and not missing_too) or (not is_url(path) and not isinstance(error, OSError)):
            raise
        reason = "no such file or bucket" if missing else (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = _ADVICE.get(path.partition("://")[0])
        raise UserError(f"{path}: cannot be {doing}: {reason}" + (f"\n  {advice}" if advice else "")) from None


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
    except FileNotFoundError:
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
