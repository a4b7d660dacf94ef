"""Where the text of a split is: files, found by braces and globs, or the shards of a Hugging Face dataset."""

import hashlib
import os
from dataclasses import dataclass

import fsspec
from braceexpand import braceexpand

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.hf_dataset import DatasetShard, dataset_splits, list_dataset_shards

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Source:
    """One input file. `fingerprint` covers its size and its first and last 64 KB: enough to notice a change."""

    url: str
    bytes: int
    fingerprint: str


AnySource = Source | DatasetShard


def list_sources(config: DataConfig, split: str) -> list[AnySource]:
    """The sources of a split in their order. Raises `UserError` if any is not to be had."""
    if config.id is not None:
        return list(list_dataset_shards(config, split))
    return [describe_source(url) for url in expand_urls(config.urls(split))]


def describe_urls(config: DataConfig, split: str) -> list[str]:
    """What the config says of a split's sources, as written: what a finished cache remembers."""
    if config.id is not None:
        return [f"dataset {config.id} {config.name or ''} {split}{' (stream)' if config.stream else ''}"]
    return config.urls(split)


def has_text(config: DataConfig, split: str) -> bool:
    """Whether the config has text for a split. A dataset may lack `validation`."""
    if config.id is not None:
        return split == "train" or split in dataset_splits(config)
    return bool(config.urls(split))


def expand_urls(urls: list[str]) -> list[str]:
    """Braces first, then globs, in the order written. Raises `UserError` naming every url that matches nothing."""
    found: list[str] = []
    missing: list[str] = []
    for url in urls:
        try:
            names = list(braceexpand(os.path.expanduser(url)))
        except ValueError:  # UnbalancedBracesError, which the package does not export to type checkers
            raise UserError(f"{url}: the braces do not match") from None
        for name in names:
            matches = _matches(name)
            found.extend(matches)
            if not matches:
                missing.append(name)
    if missing:
        raise FilesMissingError("no such file: " + ", ".join(missing))
    repeated = sorted({name for name in found if found.count(name) > 1})
    if repeated:
        raise UserError("named more than once: " + ", ".join(repeated))
    for name in found:
        format_of(name)
    return found


class FilesMissingError(UserError):
    """Input files that are not there; a finished cache can do without them."""


def _matches(name: str) -> list[str]:
    try:
        fs, path = fsspec.core.url_to_fs(name)
        if fs.isfile(path):  # first, since a name may hold a glob's signs
            return [name]
        found = [match for match in fs.glob(path) if fs.isfile(match)] if any(sign in path for sign in "*?[") else []
        return sorted(fs.unstrip_protocol(match) if "://" in name else match for match in found)
    except (ValueError, ImportError, OSError) as error:
        raise UserError(f"{name}: cannot be read: {error}") from None


def describe_source(url: str) -> Source:
    """Size and fingerprint of one file, reading at most 128 KB of it."""
    fs, path = fsspec.core.url_to_fs(url)
    size = int(fs.size(path))
    digest = hashlib.sha256(str(size).encode())
    with fs.open(path, "rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size - _SAMPLE_BYTES))
        digest.update(file.read(_SAMPLE_BYTES))
    return Source(url, size, digest.hexdigest()[:16])


def format_of(url: str) -> tuple[str, str | None]:
    """Extension and compression of a readable file. Raises `UserError` for a format lmtrain does not read."""
    stem, extension = os.path.splitext(url)
    compression = COMPRESSIONS.get(extension)
    if compression:
        extension = os.path.splitext(stem)[1]
    if extension not in READERS or (compression and extension == ".parquet"):
        readable = f"{' '.join(READERS)}, and all but .parquet with {' '.join(COMPRESSIONS)} after it"
        raise UserError(f"{url}: not a format lmtrain reads ({readable})")
    return extension, compression
