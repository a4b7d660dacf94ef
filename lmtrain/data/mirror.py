"""Local copies of the shards of a cache at a URL, so that reading them is as fast as reading a local cache."""

import contextlib
import os
import threading
from functools import partial

from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import ShardInfo, shard_path
from lmtrain.data.sampled import sample_checksum
from lmtrain.data.shards import Shards
from lmtrain.data.token_file import changed
from lmtrain.runtime.atomic_files import UNUSED_SECONDS, file_sha256, remove_temporaries
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import download, is_url, join, read_range, read_reliably

# The most recently requested copies are never deleted, whatever the limit: they are being read.
_KEPT = 8


class Mirror:
    """Local copies of shards in `folder`, named by checksum. Above `max_bytes` the least recently used are deleted."""

    def __init__(self, url: str, folder: str, max_bytes: int):
        self.url = url
        self._folder = os.path.expanduser(folder)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._recent: list[str] = []
        try:
            os.makedirs(self._folder, exist_ok=True)
            remove_temporaries(self._folder, age=UNUSED_SECONDS)  # other processes may use the same folder
        except OSError as error:
            raise UserError(f"data.mirror_dir: {folder} cannot be created: {error.strerror}") from None

    def locate(self, info: ShardInfo) -> str:
        """Path of the local copy of a shard, downloaded if missing; of a local file that is read in place, its own.

        Raises `UserError` if unavailable or corrupt.
        """
        if not is_url(shard_path(self.url, info)):
            return shard_path(self.url, info)
        path = os.path.join(self._folder, f"{info.sha256}.arrayrecord")
        with self._lock:
            alone = self._locks.setdefault(path, threading.Lock())
            self._recent = [*(name for name in self._recent if name != path), path][-_KEPT:]
        with alone:
            if os.path.isfile(path) and os.path.getsize(path) == info.bytes:
                os.utime(path)  # marks the last use, which decides what is deleted first
            else:
                self._make_room(info.bytes)
                self._copy(info, path)
        return path

    def fetch_ahead(self, shards: Shards) -> None:
        """Prefetch shards in their order in a background thread, up to the size limit."""
        threading.Thread(target=self._fetch, args=(shards,), name="mirror", daemon=True).start()

    def _fetch(self, shards: Shards) -> None:
        taken = 0
        try:
            for info in shards.follow():
                taken += info.bytes
                if taken > self._max_bytes:
                    return
                self.locate(info)
        except Exception:
            return  # the reader of the shard gets the error

    def _copy(self, info: ShardInfo, path: str) -> None:
        source = shard_path(self.url, info)
        temporary = f"{path}.tmp-{os.getpid()}"

        def read() -> str:
            download(source, temporary)
            return _checksum(temporary, info)

        try:
            if read_reliably(source, read, lambda checksum: checksum == info.sha256) != info.sha256:
                if info.in_place:
                    raise changed(source)
                raise UserError(
                    f"{source}: checksum mismatch with the manifest: the cache is corrupt; delete that shard, its "
                    f".json and {join(self.url, 'manifest.json')}, and run `lmtrain preprocess` again"
                )
            os.replace(temporary, path)
        except FileNotFoundError:
            raise UserError(f"{source} is missing: the cache is corrupt; run `lmtrain preprocess` again") from None
        except OSError as error:
            raise UserError(f"data.mirror_dir: {path} cannot be written: {error.strerror}") from None
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)

    def _make_room(self, size: int) -> None:
        with self._lock:
            copies = self._copies()
            used = sum(status.st_size for _, status in copies)
            for path, status in copies:
                if used + size <= self._max_bytes:
                    return
                if path not in self._recent:
                    used -= status.st_size
                    with contextlib.suppress(FileNotFoundError):
                        os.remove(path)  # a reader that has it open can still read it

    def _copies(self) -> list[tuple[str, os.stat_result]]:
        """All copies, least recently used first. Other processes may delete some at the same time."""
        copies = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(".arrayrecord"):
                with contextlib.suppress(FileNotFoundError):
                    copies.append((entry.path, entry.stat()))
        return sorted(copies, key=lambda copy: copy[1].st_mtime)


def _checksum(path: str, info: ShardInfo) -> str:
    """The checksum of a copy, to compare with `info.sha256`: of a file of another system sampled."""
    if info.layout is None:
        return file_sha256(path)
    return sample_checksum(os.path.getsize(path), partial(read_range, path))


def warn_if_small(url: str, shards: Shards, max_bytes: int) -> None:
    """Warn if a complete cache does not fit the mirror, since a full shuffle reads from all shards."""
    size = sum(info.bytes for info in shards.infos)
    if size > max_bytes:
        log.warning(
            f"{url}: {size / 1e9:.1f} GB of shards do not fit data.max_mirror_bytes ({max_bytes / 1e9:.1f} GB), and "
            "data.shuffle true reads from all of them: they will be downloaded repeatedly. Set data.shuffle to a "
            "number to shuffle within blocks, or raise data.max_mirror_bytes"
        )
