"""What makes a checkpoint complete: `manifest.json`, written last, with the size and checksum of every other file.

A file's checksum is the XXH3 (128 bits) of the XXH3 of its blocks, so that large files are hashed by several threads.
It finds damage; it is no protection against somebody who means to deceive.
"""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import xxhash

from lmtrain.checkpoint.policies import Kind
from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import is_url, join, list_files, read_blocks, read_bytes, write_bytes

NAME = "manifest.json"
_BLOCK_BYTES = 1 << 24
_FORMAT = 1


class DamagedError(UserError):
    """A checkpoint is not what was written; the message says which files."""


@dataclass(frozen=True)
class FileRecord:
    """`size` in bytes; `checksum` in hexadecimal."""

    size: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """`files` by their paths within the checkpoint; `saved` seconds since 1970, of the machine that wrote it."""

    step: int
    kind: Kind
    saved: float
    files: Mapping[str, FileRecord]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write it, whole or not at all: from now on the checkpoint is complete."""
    write_bytes(join(folder, NAME), _to_bytes(manifest))


def read_manifest(folder: str) -> Manifest:
    """Raises FileNotFoundError if there is none, `DamagedError` if it is not as it was written, and `UserError` if
    another version of lmtrain wrote it in another way."""
    content = read_bytes(join(folder, NAME))
    try:
        value = json.loads(content)
        told = value.pop("checksum")
        if told != _checksum(value):
            raise ValueError
        if (value["format"], value["block_bytes"]) != (_FORMAT, _BLOCK_BYTES):
            raise UserError(f"{folder}: {NAME} has format {value['format']}, this version of lmtrain reads {_FORMAT}")
        files = {name: FileRecord(int(size), str(checksum)) for name, (size, checksum) in value["files"].items()}
        manifest = Manifest(int(value["step"]), Kind(value["kind"]), float(value["saved"]), files)
        if _to_bytes(manifest) != content:
            raise ValueError
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise DamagedError(f"{NAME} is damaged") from None
    return manifest


def _to_bytes(manifest: Manifest) -> bytes:
    value: dict[str, Any] = {
        "format": _FORMAT,
        "step": manifest.step,
        "kind": manifest.kind.value,
        "saved": manifest.saved,
        "block_bytes": _BLOCK_BYTES,
        "files": {name: [record.size, record.checksum] for name, record in manifest.files.items()},
    }
    value["checksum"] = _checksum(value)
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _checksum(value: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode()))


def record_files(folder: str, names: Iterable[str]) -> dict[str, FileRecord]:
    """Read these files of a folder to their ends and record them."""
    names = sorted(names)
    with ThreadPoolExecutor(_threads(folder)) as pool:
        if is_url(folder):  # whole files at once: a block of one would open it anew
            return dict(zip(names, pool.map(lambda name: _record_stream(join(folder, name)), names), strict=True))
        sizes = {name: os.path.getsize(join(folder, name)) for name in names}
        hashes = {
            name: [pool.submit(_hash_block, join(folder, name), start) for start in range(0, size, _BLOCK_BYTES)]
            for name, size in sizes.items()
        }
        return {name: FileRecord(size, _combine(job.result() for job in hashes[name])) for name, size in sizes.items()}


def check_sizes(folder: str, manifest: Manifest) -> None:
    """Raise `DamagedError` if a file is missing, or has another size."""
    found = list_files(folder)
    wrong = [
        f"{name} is missing" if name not in found else f"{name} has {found[name]:,} bytes, not {record.size:,}"
        for name, record in manifest.files.items()
        if found.get(name) != record.size
    ]
    if wrong:
        raise DamagedError("; ".join(wrong))


def wrong_bytes(folder: str, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Those of the files `names` that are not as they were written, read to their ends; sizes have been checked."""
    records = record_files(folder, names)
    return [name for name, record in records.items() if record != manifest.files[name]]


def _threads(folder: str) -> int:
    """At a URL most of the time is waiting."""
    return 8 if is_url(folder) else os.cpu_count() or 1


def _hash_block(path: str, start: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return bytes(xxhash.xxh3_128_digest(file.read(_BLOCK_BYTES)))


def _record_stream(path: str) -> FileRecord:
    size, hashes = 0, []
    for block in read_blocks(path, _BLOCK_BYTES):
        size += len(block)
        hashes.append(xxhash.xxh3_128_digest(block))
    return FileRecord(size, _combine(hashes))


def _combine(hashes: Iterable[bytes]) -> str:
    return str(xxhash.xxh3_128_hexdigest(b"".join(hashes)))
