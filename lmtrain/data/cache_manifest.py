"""Manifest and shards of a token cache. `data/` reads them, `preprocess/` writes them.

    <cache_dir>/<split>/manifest.json                      written last: its presence means complete
    <cache_dir>/<split>/shard-00000-of-00008.arrayrecord   blocks of tokens
    <cache_dir>/<split>/shard-00000-of-00008.json          written after its shard: this shard is finished

A shard holds the documents of one source, in records of `block_tokens` tokens (the last one shorter). A record holds
its token ids (uint16 or uint32, see `dtype`), followed by the end offset in tokens of each document that ends in the
record (uint16), so that a reader of one block also knows its documents. All numbers are little-endian.

A shard may also be a file that another system wrote, or one of another cache, which is read in place: it has a `layout`
or a `dtype` of its own, and `file` is its complete path. A manifest with such shards has format 4.

Format 2 is that of text. Format 3 is that of documents with targets (conversations and completions): each record also
has, at its end, one bit for each of its tokens, true for targets, packed with the first token in the lowest bit. One
more record, the last one, holds the length of each document in tokens (uint32).
"""

import itertools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lmtrain.runtime.errors import UserError
from lmtrain.runtime.redact import redact
from lmtrain.runtime.storage import join, read_json, write_json

TEXT_FORMAT = 2
TARGETS_FORMAT = 3
IN_PLACE_FORMAT = 4
BLOCK_TOKENS = 16384


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One finished shard: its source, without secrets in its URL, and its contents."""

    file: str
    source: dict[str, Any]
    bytes: int
    sha256: str
    tokens: int
    documents: int | None  # None: not counted, in a file that is read in place
    skipped: int = 0
    bad_records: list[str] = field(default_factory=list)  # the first skipped records, each with its location
    targets: int | None = None  # target tokens; None in shards of text, whose tokens are all targets
    warnings: list[str] = field(default_factory=list)
    layout: dict[str, Any] | None = None  # of a file that another system wrote, see `TokenLayout`
    dtype: str | None = None  # of a shard of another cache
    dropped: int = 0  # documents that were left out, with `dropped_tokens` tokens
    dropped_tokens: int = 0

    @property
    def in_place(self) -> bool:
        return self.layout is not None or self.dtype is not None

    @property
    def described(self) -> dict[str, Any]:
        """The form in which it is written: that of text has no fields for targets."""
        optional = ("targets", "warnings", "layout", "dtype", "dropped", "dropped_tokens")
        unset = {"dropped": 0, "dropped_tokens": 0, "warnings": []}
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in optional or value != unset.get(name)}


@dataclass(frozen=True, kw_only=True)
class CacheManifest:
    """Manifest of a finished split. `recipe` is how the tokens were made: equal recipe and sources give equal bytes.

    It has no secrets: they are masked in what is loaded, since earlier versions wrote some.
    """

    split: str
    recipe: dict[str, Any]
    urls: list[str]
    dtype: str
    shards: list[ShardInfo]

    @property
    def has_targets(self) -> bool:
        return has_targets(self.recipe)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int | None:
        """None if not all are counted."""
        return count_documents(self.shards)

    @property
    def skipped(self) -> int:
        return sum(shard.skipped for shard in self.shards)


def count_documents(shards: Sequence[ShardInfo]) -> int | None:
    """Number of documents; None if those of some shards are not counted."""
    counts = [shard.documents for shard in shards if shard.documents is not None]
    return sum(counts) if len(counts) == len(shards) else None


def shard_path(folder: str, info: ShardInfo) -> str:
    """Path or URL of a shard of the cache in `folder`."""
    return info.file if info.in_place else join(folder, info.file)


def has_targets(recipe: Mapping[str, Any]) -> bool:
    """Whether documents made by this recipe have targets, and their shards format 3."""
    return "format" in recipe.get("documents", {})


def has_pairs(recipe: Mapping[str, Any]) -> bool:
    """Whether documents made by this recipe are pairs of answers: first the chosen one, then the rejected one."""
    return bool(recipe.get("documents", {}).get("format", {}).get("type") == "preference")


def manifest_path(folder: str) -> str:
    """Path of the manifest of a cache."""
    return join(folder, "manifest.json")


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0), without extension."""
    return f"shard-{index:05d}-of-{count:05d}"


def save_manifest(folder: str, manifest: CacheManifest) -> None:
    """Write the manifest, which marks the cache as complete."""
    written = TARGETS_FORMAT if manifest.has_targets else TEXT_FORMAT
    totals = {
        "format": IN_PLACE_FORMAT if any(shard.in_place for shard in manifest.shards) else written,
        "block_tokens": BLOCK_TOKENS,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
    }
    shards = [shard.described for shard in manifest.shards]
    write_json(manifest_path(folder), totals | asdict(manifest) | {"shards": shards})


def load_manifest(folder: str) -> CacheManifest | None:
    """Load the manifest of a finished split; None if there is none. Raises `UserError` if it is invalid."""
    path = manifest_path(folder)
    try:
        value = redact(read_json(path))
    except FileNotFoundError:
        return None
    except UserError:
        raise  # access failed
    except ValueError as error:
        raise UserError(f"{path}: corrupt: {error}; delete the folder to build the cache again") from None
    known = (TEXT_FORMAT, TARGETS_FORMAT, IN_PLACE_FORMAT)
    if value.get("format") not in known or value.get("block_tokens") != BLOCK_TOKENS:
        raise UserError(
            f"{path}: unsupported format {value.get('format')}, expected {' or '.join(map(str, known))}: written by "
            "another version of lmtrain; delete the folder to build the cache again"
        )
    return CacheManifest(
        split=value["split"],
        recipe=value["recipe"],
        urls=value["urls"],
        dtype=value["dtype"],
        shards=[ShardInfo(**shard) for shard in value["shards"]],
    )


# Finished shards of a split in source order: all of them, or those so far while the cache is being built.
#
# The builder adds shards without gaps; a reader waits for the number of tokens that it needs. The data that is read
# therefore never depends on how fast the cache grows.


class Shards:
    """Shards so far (`infos`); `starts[i]` is the number of tokens before shard i, and its last entry the total.

    `complete` is true once no more will be added. Any number of threads may read while one adds.
    """

    def __init__(self) -> None:
        self.infos: list[ShardInfo] = []
        self.starts = np.zeros(1, np.int64)
        self.complete = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, manifest: CacheManifest) -> "Shards":
        shards = cls()
        shards.infos = list(manifest.shards)
        shards.starts = np.cumsum([0, *(shard.tokens for shard in manifest.shards)]).astype(np.int64)
        shards.complete = True
        return shards

    @classmethod
    def of_one(cls, info: ShardInfo) -> "Shards":
        shards = cls()
        shards.add(info)
        shards.finish()
        return shards

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def add(self, info: ShardInfo) -> None:
        with self._changed:
            self.infos.append(info)
            self.starts = np.append(self.starts, self.starts[-1] + info.tokens)
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self.complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Raise `error` in all current and later readers."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error of a failed build, or of a corrupt shard."""
        if self._error is not None:
            raise self._error

    def follow(self) -> Iterator[ShardInfo]:
        """Iterate over all shards in order, waiting for missing ones. Raises the error of a failed build."""
        for number in itertools.count():
            self._wait(shards=number + 1)
            if number == len(self.infos):
                return
            yield self.infos[number]

    def wait_for(self, tokens: int | None) -> int:
        """Wait for `tokens` tokens, or until the cache is complete (None), and return the number of tokens.

        Raises the error of a failed build, whatever has been built.
        """
        self._wait(tokens=math.inf if tokens is None else tokens)
        return self.tokens

    def _wait(self, shards: float = math.inf, tokens: float = math.inf) -> None:
        """Wait until there are as many shards or tokens, or no more will be added."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._error or self.complete or len(self.infos) >= shards or self.tokens >= tokens
            )
            self.check()
