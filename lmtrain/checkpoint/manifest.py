"""The manifest of a checkpoint: `manifest.json`, written last, with the size and checksum of every other file.

A checkpoint is complete once it has one. A file's checksum is the XXH3 (128 bits) of the XXH3 of its blocks, so that
several threads can hash a large file. It detects corruption, but does not protect against deliberate manipulation.
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
    """A corrupt checkpoint; the message names the files."""


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file: `size` in bytes, `checksum` in hexadecimal."""

    size: int
    checksum: str


@dataclass(frozen=True)
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
    content = read_bytes(join(folder, NAME))
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
        manifest = Manifest(int(value["step"]), Kind(value["kind"]), float(value["saved"]), files)
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
        "files": {name: [record.size, record.checksum] for name, record in manifest.files.items()},
    }
    value["checksum"] = _checksum(value)
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def _checksum(value: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode()))


def record_files(folder: str, names: Iterable[str]) -> dict[str, FileRecord]:
    """Size and checksum of these files of a folder; reads them completely."""
    names = sorted(names)
    with ThreadPoolExecutor(_threads(folder)) as pool:
        if is_url(folder):  # one thread per file: reading blocks in parallel would open the file for each block
            return dict(zip(names, pool.map(lambda name: _record_stream(join(folder, name)), names), strict=True))
        sizes = {name: os.path.getsize(join(folder, name)) for name in names}
        hashes = {
            name: [pool.submit(_hash_block, join(folder, name), start) for start in range(0, size, _BLOCK_BYTES)]
            for name, size in sizes.items()
        }
        return {name: FileRecord(size, _combine(job.result() for job in hashes[name])) for name, size in sizes.items()}


def check_sizes(folder: str, manifest: Manifest) -> None:
    """Raise `DamagedError` if a file is missing or has a wrong size."""
    found = list_files(folder)
    wrong = [
        f"{name} is missing" if name not in found else f"{name} has {found[name]:,} bytes, not {record.size:,}"
        for name, record in manifest.files.items()
        if found.get(name) != record.size
    ]
    if wrong:
        raise DamagedError("; ".join(wrong))


def wrong_bytes(folder: str, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """The files of `names` with a checksum mismatch; reads them completely. Call `check_sizes` first."""
    records = record_files(folder, names)
    return [name for name, record in records.items() if record != manifest.files[name]]


def _threads(folder: str) -> int:
    """Number of threads; for URLs independent of the CPUs, because most of the time is waiting."""
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
