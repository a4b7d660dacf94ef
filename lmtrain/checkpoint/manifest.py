"""The manifest of a checkpoint: `manifest.json`, written last, with the size and checksum of every other file.

A checkpoint is complete once it has one. A file's checksum is the XXH3 (128 bits) of the XXH3 of its blocks, so that
several threads can hash a large file. It detects corruption, but does not protect against deliberate manipulation.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import xxhash

from lmtrain.checkpoint.config import Kind
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import is_url, join, list_files, read_bytes, read_range, read_reliably, write_bytes

NAME = "manifest.json"
_BLOCK_BYTES = 1 << 24
_FORMAT = 1


class DamagedError(UserError):
    """A corrupt checkpoint; the message names the files."""


class FileRecord(NamedTuple):
    """Size and checksum of a file: `size` in bytes, `checksum` in hexadecimal."""

    size: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of `manifest.json`: `files` by path within the checkpoint; `saved` in seconds since 1970."""

    step: int
    kind: Kind
    saved: float
    files: Mapping[str, FileRecord]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest atomically, which makes the checkpoint complete."""
    write_bytes(join(folder, NAME), _to_bytes(manifest))


def read_manifest(folder: str) -> Manifest:
    """Read the manifest in `folder`.

    Raises FileNotFoundError if it is missing, `DamagedError` if it is corrupt, and `UserError` if it has the format of
    another version of lmtrain.
    """
    path = join(folder, NAME)
    return _from_bytes(folder, read_reliably(path, lambda: read_bytes(path), partial(_is_intact, folder)))


def _is_intact(folder: str, content: bytes) -> bool:
    try:
        _from_bytes(folder, content)
    except DamagedError:
        return False
    return True


def _from_bytes(folder: str, content: bytes) -> Manifest:
    try:
        value = json.loads(content)
        expected = value.pop("checksum")
        if expected != _checksum(value):
            raise ValueError
        if (value["format"], value["block_bytes"]) != (_FORMAT, _BLOCK_BYTES):
            raise UserError(
                f"{folder}: {NAME} has the unsupported format {value['format']}, expected {_FORMAT}: it was written by "
                "another version of lmtrain"
            )
        files = {name: FileRecord(int(size), str(checksum)) for name, (size, checksum) in value["files"].items()}
        manifest = Manifest(step=int(value["step"]), kind=Kind(value["kind"]), saved=float(value["saved"]), files=files)
        if _to_bytes(manifest) != content:
            raise ValueError
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DamagedError(f"{NAME} is corrupt") from None
    return manifest


def _to_bytes(manifest: Manifest) -> bytes:
    value: dict[str, Any] = {
        "format": _FORMAT,
        "step": manifest.step,
        "kind": manifest.kind.value,
        "saved": manifest.saved,
        "block_bytes": _BLOCK_BYTES,
        "files": dict(manifest.files),
    }
    value["checksum"] = _checksum(value)
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _checksum(value: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode()))


def record_files(folder: str, names: Collection[str]) -> dict[str, FileRecord]:
    """Size and checksum of these files of a folder; reads them completely.

    Raises FileNotFoundError if one is missing.
    """
    listed = list_files(folder)
    missing = [name for name in names if name not in listed]
    if missing:
        raise FileNotFoundError(f"no such file: {join(folder, missing[0])}")

    def hash_block(name: str, start: int) -> bytes:
        content = read_range(join(folder, name), start, start + _BLOCK_BYTES)
        return bytes(xxhash.xxh3_128_digest(content))

    # reading from a URL is mostly waiting, whatever the number of CPUs
    with ThreadPoolExecutor(8 if is_url(folder) else os.cpu_count()) as pool:
        blocks = {
            name: [pool.submit(hash_block, name, start) for start in range(0, listed[name], _BLOCK_BYTES)]
            for name in sorted(names)
        }
        return {
            name: FileRecord(listed[name], xxhash.xxh3_128_hexdigest(b"".join(block.result() for block in parts)))
            for name, parts in blocks.items()
        }


def check_sizes(folder: str, manifest: Manifest) -> None:
    """Raise `DamagedError` if a file is missing or has a wrong size."""
    sizes = list_files(folder)
    wrong = [
        f"{name} is missing" if name not in sizes else f"{name} has {sizes[name]:,} bytes, not {record.size:,}"
        for name, record in manifest.files.items()
        if sizes.get(name) != record.size
    ]
    if wrong:
        raise DamagedError("; ".join(wrong))


def wrong_bytes(
    folder: str, manifest: Manifest, names: Collection[str], fetch: Callable[[str], None] = lambda name: None
) -> list[str]:
    """The files of `names` with a checksum mismatch in two equal reads; reads them completely.

    `fetch` is called before a file is read again. Raises `UserError` if all reads differ, as on a bad network. Call
    `check_sizes` first.
    """

    def read(name: str) -> FileRecord:
        fetch(name)
        return record_files(folder, [name])[name]

    records = record_files(folder, names)
    doubtful = [name for name, record in records.items() if record != manifest.files[name]]
    return [
        name
        for name in doubtful
        if read_reliably(join(folder, name), partial(read, name), manifest.files[name].__eq__) != manifest.files[name]
    ]
