"""What a token cache says about itself. `data/` reads it, `preprocess/` writes it.

    <cache_dir>/<split>/manifest.json                      written last: its presence means complete
    <cache_dir>/<split>/shard-00000-of-00008.arrayrecord   blocks of tokens
    <cache_dir>/<split>/shard-00000-of-00008.json          written after its shard: this shard is finished

A shard holds the documents of one source, in records of `block_tokens` tokens (the last one shorter). A record is its
token ids, uint16 or uint32 as `dtype` says, and after them, uint16, how many of these tokens lie before the end of
each document that ends among them: whoever reads a block knows its documents too. All numbers are little-endian.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import join, read_json, write_json

FORMAT = 2
BLOCK_TOKENS = 16384


@dataclass(frozen=True)
class ShardInfo:
    """One finished shard: where it came from and what it holds."""

    file: str
    source: dict[str, Any]
    bytes: int
    sha256: str
    tokens: int
    documents: int
    skipped: int = 0
    bad_records: list[str] = field(default_factory=list)  # the first of the skipped ones, each with its place


@dataclass(frozen=True)
class Manifest:
    """A finished split. `recipe` says how the tokens were made; the same recipe and sources give the same bytes."""

    split: str
    recipe: dict[str, Any]
    urls: list[str]
    dtype: str
    shards: list[ShardInfo]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def skipped(self) -> int:
        return sum(shard.skipped for shard in self.shards)


def manifest_path(folder: str) -> str:
    """Where the manifest of a cache is."""
    return join(folder, "manifest.json")


def shard_name(index: int, count: int) -> str:
    """The name of the file of shard `index`, counted from 0."""
    return f"shard-{index:05d}-of-{count:05d}"


def save_manifest(folder: str, manifest: Manifest) -> None:
    """Write the manifest, which says that the cache is complete."""
    totals = {
        "format": FORMAT,
        "block_tokens": BLOCK_TOKENS,
        "tokens": manifest.tokens,
        "documents": manifest.documents,
    }
    write_json(manifest_path(folder), totals | asdict(manifest))


def load_manifest(folder: str) -> Manifest | None:
    """The manifest of a finished split, None if there is none. Raises `UserError` if it cannot be understood."""
    path = manifest_path(folder)
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    except UserError:
        raise  # it cannot be looked at
    except ValueError as error:
        raise UserError(f"{path}: damaged: {error}; delete the folder to build the cache again") from None
    if value.get("format") != FORMAT or value.get("block_tokens") != BLOCK_TOKENS:
        raise UserError(
            f"{path}: written in format {value.get('format')} by another version of lmtrain, this one reads {FORMAT}; "
            "delete the folder to build the cache again"
        )
    return Manifest(
        split=value["split"],
        recipe=value["recipe"],
        urls=value["urls"],
        dtype=value["dtype"],
        shards=[ShardInfo(**shard) for shard in value["shards"]],
    )
