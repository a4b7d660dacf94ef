"""Checksums of the shards of local caches, verified in the background the first time that a machine uses a cache.

Copies of remote shards are verified when they are downloaded (`mirror.py`), and ArrayRecord verifies each record that
is read. This finds a corrupt shard before training reaches it.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from lmtrain.data.cache_manifest import ShardInfo, Shards, shard_path
from lmtrain.data.token_file import changed
from lmtrain.data.token_store import corrupt_shard, open_token_file
from lmtrain.runtime.errors import ReadError, UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.signals import StoppedError
from lmtrain.runtime.storage import UNUSED_SECONDS, file_sha256, is_url, remove_temporaries, write_atomically

_SECONDS_BETWEEN_RECORDS = 60.0


def verify_in_background(folder: str, shards: Shards) -> threading.Thread:
    """Start to verify the shards of a cache in their order; readers get the error of the first corrupt one.

    Raises `ReadError` if the thread cannot be started.
    """

    def run() -> None:
        with contextlib.suppress(StoppedError):  # the build ended with the run
            verify(folder, shards)

    thread = threading.Thread(target=run, name="verify shards", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ReadError(f"reading {folder} failed: {error}; free memory, or raise the limits of this process") from None
    return thread


def verify(folder: str, shards: Shards, report: Callable[[int], None] = lambda read: None) -> None:
    """Verify the shards that this machine has not verified before, also those that are still to come.

    `report` gets the number of bytes of each part that has been read of files of token ids. It may raise
    `StoppedError`: then the files before are recorded.
    """
    verified = _read_record(folder)
    size, saved = 0, time.monotonic()
    try:
        for info in shards.follow():
            path = shard_path(folder, info)
            if is_url(path):
                continue  # verified when it is downloaded
            before, now = verified.get(info.file, []), _describe(path, info)
            if before[: len(now)] == now:
                continue
            if info.layout is not None:
                with contextlib.closing(open_token_file(info, lambda info: info.file)) as file:
                    now.append(file.scan(report))
                # the samples of its parts are the same, or it would have been refused; are all ids?
                if len(before) == len(now) and before[2] == now[2] and before[-1] != now[-1]:
                    raise changed(path)
            elif file_sha256(path) != info.sha256:
                shards.fail(corrupt_shard(path, "has another checksum than in the manifest"))
                return
            verified[info.file] = now
            size += info.bytes
            if time.monotonic() - saved > _SECONDS_BETWEEN_RECORDS:
                _save_record(folder, verified)
                saved = time.monotonic()
    except StoppedError:
        raise
    except UserError as error:  # the file has changed, or has a wrong id
        shards.fail(error)
    except OSError:
        return  # the reader of the shard gets the error
    except Exception as error:  # of the build, which its readers get, too
        log.debug(f"{folder}: {error}")
        return
    finally:
        if size:
            _save_record(folder, verified)
    if size:
        log.info(f"{folder}: checksums of {format_bytes(size)} verified")


def bytes_to_verify(folder: str, shards: Shards) -> int:
    """Number of bytes of files of token ids that `verify` will read."""
    verified, size = _read_record(folder), 0
    for info in shards.infos:
        if info.layout is not None and not is_url(info.file):
            now = _describe(info.file, info)
            size += 0 if verified.get(info.file, [])[: len(now)] == now else info.bytes
    return size


def forget(folder: str) -> None:
    """Forget what was verified of a cache, since it is a new one."""
    with contextlib.suppress(OSError):
        os.remove(_record_path(folder))


def _record_path(folder: str) -> str:
    """Path of the record of verified shards of a cache on this machine; XDG_CACHE_HOME moves it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(f"{socket.gethostname()} {os.path.realpath(folder)}".encode()).hexdigest()[:16]
    return os.path.join(root, "lmtrain", "verified", f"{name}.json")


def _read_record(folder: str) -> dict[str, list[Any]]:
    """What was verified, by file: sizes, times and checksums of the file and its index, then the CRC-32 of all ids."""
    try:
        with open(_record_path(folder), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    items = record.items() if isinstance(record, dict) else ()
    return {name: described for name, described in items if isinstance(described, list)}


def _save_record(folder: str, verified: dict[str, list[Any]]) -> None:
    record = _record_path(folder)
    with contextlib.suppress(OSError):  # without a record they are verified again next time
        os.makedirs(os.path.dirname(record), exist_ok=True)
        remove_temporaries(os.path.dirname(record), age=UNUSED_SECONDS)
        write_atomically(record, json.dumps(verified).encode(), durable=False)


def _describe(path: str, info: ShardInfo) -> list[Any]:
    status = os.stat(path)
    described = [status.st_size, status.st_mtime_ns, info.sha256]
    if info.layout is not None and (index := info.layout["index"]) is not None:
        status = os.stat(index["file"])
        described += [status.st_size, status.st_mtime_ns, index["checksum"]]
    return described
