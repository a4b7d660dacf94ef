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
from typing import Any

from lmtrain.config.errors import ReadError, UserError
from lmtrain.data.cache_manifest import ShardInfo, shard_path
from lmtrain.data.shards import Shards
from lmtrain.data.token_store import corrupt_shard, open_token_file
from lmtrain.runtime.atomic_files import UNUSED_SECONDS, file_sha256, remove_temporaries, write_atomically
from lmtrain.runtime.logging import log
from lmtrain.runtime.progress import format_bytes
from lmtrain.runtime.storage import is_url


def verify_in_background(folder: str, shards: Shards) -> threading.Thread:
    """Start to verify the shards of a cache in their order; readers get the error of the first corrupt one.

    Raises `ReadError` if the thread cannot be started.
    """
    thread = threading.Thread(target=verify, args=(folder, shards), name="verify shards", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ReadError(f"reading {folder} failed: {error}; free memory, or raise the limits of this process") from None
    return thread


def verify(folder: str, shards: Shards) -> None:
    """Verify the shards that this machine has not verified before, also those that are still to come."""
    record = _record_path(folder)
    verified = _read_record(record)
    size = 0
    try:
        for info in shards.follow():
            path = shard_path(folder, info)
            if is_url(path):
                continue  # verified when it is downloaded
            described = _describe(path, info)
            if verified.get(info.file) == described:
                continue
            if info.layout is not None:
                with contextlib.closing(open_token_file(info, lambda info: info.file)) as file:
                    file.scan()
            elif file_sha256(path) != info.sha256:
                shards.fail(corrupt_shard(path, "has another checksum than in the manifest"))
                return
            verified[info.file] = described
            size += info.bytes
    except UserError as error:  # the file has changed, or has a wrong id
        shards.fail(error)
    except OSError:
        return  # the reader of the shard gets the error
    except Exception as error:  # of the build, which its readers get, too
        log.debug(f"{folder}: {error}")
        return
    if size:
        log.info(f"{folder}: checksums of {format_bytes(size)} verified")
        with contextlib.suppress(OSError):  # without a record they are verified again next time
            os.makedirs(os.path.dirname(record), exist_ok=True)
            remove_temporaries(os.path.dirname(record), age=UNUSED_SECONDS)
            write_atomically(record, json.dumps(verified).encode(), durable=False)


def _record_path(folder: str) -> str:
    """Path of the record of verified shards of a cache on this machine; XDG_CACHE_HOME moves it."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(f"{socket.gethostname()} {os.path.realpath(folder)}".encode()).hexdigest()[:16]
    return os.path.join(root, "lmtrain", "verified", f"{name}.json")


def _read_record(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _describe(path: str, info: ShardInfo) -> list[Any]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, info.sha256]
