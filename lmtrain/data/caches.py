"""Token caches of a run, the local copies of those at URLs, and the number of steps they last."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lmtrain.data.cache_manifest import ShardInfo, Shards, has_pairs, shard_path
from lmtrain.data.config import BatchSizes, DataConfig
from lmtrain.data.formats import TooLong
from lmtrain.data.mixture import Mixture
from lmtrain.data.token_file import changed, sample_checksum
from lmtrain.data.token_store import TokenStore, check_file
from lmtrain.data.windows import PackedWindows, packed_windows_of
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import (
    UNUSED_SECONDS,
    download,
    file_sha256,
    is_url,
    join,
    read_range,
    read_reliably,
    remove_temporaries,
)

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Cache:
    """Token cache of one split of one source, complete or being built. `sources` has the source of each shard.

    `too_long` is the setting of `ChatFormat`, None for text. `packed` has the windows that were computed, by length.
    """

    folder: str
    recipe: dict[str, Any]
    sources: Sequence[Mapping[str, Any]]
    dtype: str
    shards: Shards
    too_long: TooLong | None = None
    packed: dict[int, PackedWindows] = field(default_factory=dict, compare=False, repr=False)

    @property
    def has_targets(self) -> bool:
        return self.too_long is not None

    @property
    def has_pairs(self) -> bool:
        return has_pairs(self.recipe)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the tokens and their order; known before any are built. Excludes the location of the text
        and the checksums that are known when it has been read."""
        place = ("url", "id", "modified", "sample", "sha256", "files")
        parts = [{name: value for name, value in s.items() if name not in place} for s in self.sources]
        return {"recipe": self.recipe, "sources": parts}


@dataclass(frozen=True)
class Caches:
    """All caches of a run by source name; the name is "" in a run with one source."""

    train: Mapping[str, Cache]
    validation: Mapping[str, Cache]

    @property
    def identity(self) -> str:
        """Hash of what determines the training tokens; a resumed run must find it unchanged."""
        parts = {name: cache.identity for name, cache in self.train.items()}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def open_store(config: DataConfig, cache: Cache) -> TokenStore:
    """Open the tokens of a cache. Raises `UserError` if shards are missing or corrupt."""
    infos = list(cache.shards.infos)
    paths = [shard_path(cache.folder, info) for info in infos]
    if is_url(cache.folder) or any(map(is_url, paths)):
        mirror = Mirror(cache.folder, config.mirror_dir, config.max_mirror_bytes)
        mirror.fetch_ahead(cache.shards)
        if config.shuffle is True:
            warn_if_small(cache.folder, cache.shards, config.max_mirror_bytes)
        locate = mirror.locate
    else:
        locate = partial(shard_path, cache.folder)
        for path, info in zip(paths, infos, strict=True):
            check_file(path, info)
    return TokenStore(cache.folder, cache.shards, cache.dtype, locate, cache.too_long, cache.has_pairs, config.pack)


def num_windows(config: DataConfig, cache: Cache, seq_len: int) -> int:
    """Number of windows of a cache that training reads, so far."""
    if not cache.has_targets:
        return cache.shards.tokens // seq_len
    return packed_windows(config, cache, seq_len).for_training()


def packed_windows(config: DataConfig, cache: Cache, seq_len: int) -> PackedWindows:
    """The windows of a cache with targets, so far. The lengths of all its documents are read for it, once."""
    if seq_len not in cache.packed:
        cache.packed[seq_len] = packed_windows_of(open_store(config, cache), seq_len)
    cache.packed[seq_len].for_training()
    return cache.packed[seq_len]


def needs_all(config: DataConfig, epoch: int, needs_reference: bool = False) -> str | None:
    """Reason why training cannot start until the training caches are complete; None if it can.

    `needs_reference`: the objective compares answers with a reference.
    """
    if config.shuffle is True:
        return "data.shuffle true requires the complete cache (a number shuffles within blocks and starts earlier)"
    if epoch:
        return "epoch requires the total number of tokens"
    if config.configs is not None and config.stop_strategy == "first_exhausted":
        return "data.stop_strategy first_exhausted requires the total number of tokens"
    if needs_reference:
        return "the reference of all answers is computed before the first step"
    return None


def build_mixture(config: DataConfig, names: list[str], batch_sizes: BatchSizes, seed: int) -> Mixture | None:
    """Mixture of the sources `names`; None for a single source.

    Raises `UserError` if a source without training text has a weight.
    """
    if config.configs is None:
        return None
    phases = []
    for step, weights in config.weight_changes(names):
        for name, weight in weights.items():
            if weight and name not in names:
                raise UserError(f"data.train_weights: {name!r} has a weight, but no training text")
        phases.append((batch_sizes.before(step), tuple(weights.get(name, 0.0) for name in names)))
    return Mixture(phases, seed)


def check_batch(config: DataConfig, caches: Caches, seq_len: int, batch_sizes: BatchSizes) -> None:
    """Raise `UserError` if a batch is larger than the data, since it would hold the same text twice."""
    if config.configs is not None:
        return
    (cache,) = caches.train.values()
    sequences, largest = num_windows(config, cache, seq_len), max(batch_sizes.all)
    if cache.shards.complete and 0 < sequences < largest:
        raise UserError(
            f"trainer.train_batch_size: {counted(largest, 'sequence')} of {seq_len:,} tokens, but {cache.folder} has "
            f"{sequences:,} ({cache.shards.tokens:,} tokens); set it to {sequences:,} at most, lower model.seq_len, or "
            "add text"
        )


def describe_epochs(
    config: DataConfig, caches: Mapping[str, Cache], seq_len: int, batch_sizes: BatchSizes
) -> list[str]:
    """One line for each source: the number of steps in one epoch at its first weight."""
    _, first = config.weight_changes(caches)[0]
    total = sum(first.get(name, 0.0) for name in caches)
    lines = []
    for name, cache in caches.items():
        share = first.get(name, 0.0) / total if name else 1.0
        if not share:
            lines.append(f"{name} has weight 0 at the first step")
            continue
        sequences = num_windows(config, cache, seq_len)
        steps = counted(batch_sizes.whole_steps(int(sequences / share)), "step")
        of = f" of {name} ({100 * share:.3g} % of the examples)" if name else ""
        line = f"one epoch{of} is {steps if cache.shards.complete else f'not known yet, {steps} so far'}"
        lines.append(line + _describe_targets(config, cache, seq_len))
    return lines


def _describe_targets(config: DataConfig, cache: Cache, seq_len: int) -> str:
    """How many tokens are targets, the share of padding, and how many documents are longer than a window; empty for
    text."""
    if not cache.has_targets:
        return ""
    targets = sum(info.targets or 0 for info in cache.shards.infos)
    windows = packed_windows(config, cache, seq_len)
    text = f"; {targets:,} of {cache.shards.tokens:,} tokens are targets; {100 * windows.padding:.1f} % padding"
    long = windows.too_long
    done = {"cut": "cut off there, counted in full", "drop": "dropped, but counted"}[cache.too_long or "cut"]
    what = "pair" if cache.has_pairs else "document"
    return f"{text}; {counted(long, what)} longer than {seq_len:,} tokens, {done}" if long else text


def choose_steps(
    config: DataConfig,
    caches: Caches,
    seq_len: int,
    batch_sizes: BatchSizes,
    num_train_steps: int,
    epoch: int,
    seed: int,
) -> int:
    """Number of steps of the run: `num_train_steps`, or fewer if the end of the data ends the run."""
    if needs_all(config, epoch) is None:
        return num_train_steps
    windows = [num_windows(config, cache, seq_len) for cache in caches.train.values()]
    mixture = build_mixture(config, list(caches.train), batch_sizes, seed)
    if mixture is None:
        return min(num_train_steps, batch_sizes.whole_steps(epoch * windows[0])) if epoch else num_train_steps
    if config.stop_strategy == "first_exhausted":
        examples = mixture.examples_within(windows, batch_sizes.before(num_train_steps))
        return min(num_train_steps, batch_sizes.whole_steps(examples))
    return num_train_steps
