"""Text sources of a split: files, expanded from braces and globs, or the shards of a Hugging Face dataset."""

import hashlib
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from braceexpand import braceexpand

from lmtrain.config.errors import UserError
from lmtrain.config.remote import is_missing, open_fs, told
from lmtrain.data.config import DataConfig
from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.hf_dataset import DatasetShard, dataset_splits, list_dataset_shards
from lmtrain.runtime.storage import is_url

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_SAMPLE_BYTES = 4096
_THREADS = 32

# Formats that can be read in parts: a line belongs to the part in which it starts.
_BY_LINES = (".jsonl", ".txt")


@dataclass(frozen=True)
class Source:
    """One input file, or its part from byte `start`; `bytes` is the size of the part.

    `fingerprint` covers the file's size and its first and last 4 KB: enough to notice a change.
    """

    url: str
    bytes: int
    fingerprint: str
    start: int | None = None

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        return self.url if self.start is None else f"{self.url} from byte {self.start:,}"


AnySource = Source | DatasetShard


def list_sources(config: DataConfig, split: str) -> list[AnySource]:
    """Sources of a split in order. Raises `UserError` if any is missing or unavailable."""
    if config.id is not None:
        return list(list_dataset_shards(config, split))
    try:
        urls = expand_urls(config.urls(split))
    except FilesMissingError as error:
        setting = {"train": "train_urls", "validation": "validation_urls"}[split]
        raise FilesMissingError(f"data.{setting}: {error}") from None
    if any(map(is_url, urls)):
        with ThreadPoolExecutor(_THREADS) as pool:
            files = list(pool.map(describe_source, urls))
    else:
        files = [describe_source(url) for url in urls]
    unsplit = config.text_documents != "line"  # parts are split at lines
    return [
        part
        for file in files
        for part in ([file] if unsplit and format_of(file.url)[0] == ".txt" else split_source(file, config.split_bytes))
    ]


def split_source(file: Source, part_bytes: int) -> list[Source]:
    """Split a large file into parts, which depend only on its size and `part_bytes`; other files stay in one part."""
    extension, compression = format_of(file.url)
    if compression or extension not in _BY_LINES or file.bytes <= part_bytes:
        return [file]
    starts = range(0, file.bytes, part_bytes)
    return [replace(file, start=start, bytes=min(part_bytes, file.bytes - start)) for start in starts]


def describe_urls(config: DataConfig, split: str) -> list[str]:
    """Sources of a split as written in the config; stored in the manifest of a finished cache."""
    if config.id is not None:
        return [f"dataset {config.id} {config.name or ''} {split}{' (stream)' if config.stream else ''}"]
    return config.urls(split)


def has_text(config: DataConfig, split: str) -> bool:
    """Whether the config has text for a split. A dataset may lack `validation`."""
    if config.id is not None:
        return split == "train" or split in dataset_splits(config)
    return bool(config.urls(split))


def expand_urls(urls: list[str]) -> list[str]:
    """Expand braces, then globs, in the order written. Raises `UserError` with all URLs that match nothing."""
    found: list[str] = []
    missing: list[str] = []
    for url in urls:
        try:
            names = list(braceexpand(os.path.expanduser(url)))
        except ValueError:  # UnbalancedBracesError, which the package does not export to type checkers
            raise UserError(f"{url}: unbalanced braces") from None
        for name in names:
            matches = _matches(name)
            found.extend(matches)
            if not matches:
                missing.append(name)
    folders = [name for name in missing if os.path.isdir(name)]
    if folders:
        name = folders[0].rstrip("/")
        raise UserError(f"{folders[0]}: is a folder; set the files in it, such as '{name}/*.jsonl'")
    if missing:
        raise FilesMissingError("no such file: " + ", ".join(missing))
    repeated = sorted(name for name, count in Counter(found).items() if count > 1)
    if repeated:
        raise UserError("listed more than once: " + ", ".join(repeated))
    for name in found:
        format_of(name)
    return found


class FilesMissingError(UserError):
    """Missing input files; a finished cache does not need them."""


def _matches(name: str) -> list[str]:
    if not is_url(name) and os.path.isfile(name):
        return [name]
    with told(name, "read"):
        fs, path = open_fs(name)
        if _is_file(fs, path):  # first, since a file name may contain glob characters
            return [name]
        if not any(sign in path for sign in "*?["):
            return []
        try:
            found = [entry for entry, info in fs.glob(path, detail=True).items() if info["type"] == "file"]
        except FileNotFoundError:  # the bucket
            return []
        return sorted(fs.unstrip_protocol(match) if is_url(name) else match for match in found)


def _is_file(fs: Any, path: str) -> bool:
    """Whether `path` is a file. Unlike fsspec's `isfile`, raises if access is denied."""
    try:
        return bool(fs.info(path)["type"] == "file")
    except FileNotFoundError as error:
        if not is_missing(error):
            raise
        return False


def describe_source(url: str) -> Source:
    """Size and fingerprint of one file, from its first and last bytes."""
    with told(url, "read"):
        if is_url(url):
            fs, path = open_fs(url)
            size = fs.info(path)["size"]
            opened = fs.open(path, "rb")
        else:
            size = os.path.getsize(url)
            opened = open(url, "rb")  # noqa: SIM115  # closed below for both kinds of file
        if size is None:
            raise UserError(
                f"{url}: the server does not report the file size; download the file and use the local path"
            )
        digest = hashlib.sha256(str(size).encode())
        with opened as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return Source(url, int(size), digest.hexdigest()[:16])


def format_of(url: str) -> tuple[str, str | None]:
    """Extension and compression of an input file. Raises `UserError` for an unsupported format."""
    stem, extension = os.path.splitext(url)
    compression = COMPRESSIONS.get(extension)
    if compression:
        extension = os.path.splitext(stem)[1]
    if extension not in READERS or (compression and extension == ".parquet"):
        readable = f"{' '.join(READERS)}, and all but .parquet with {' '.join(COMPRESSIONS)} after it"
        raise UserError(f"{url}: unsupported format (supported: {readable})")
    return extension, compression
