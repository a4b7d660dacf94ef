"""Where the text of a split is: files, found by braces and globs, or the shards of a Hugging Face dataset."""

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

# Formats of which a part can be read: a line that begins in it belongs to it.
_BY_LINES = (".jsonl", ".txt")


@dataclass(frozen=True)
class Source:
    """One input file, or its part from byte `start`. `bytes` are those of the part.

    `fingerprint` covers the file's size and its first and last 4 KB: enough to notice a change.
    """

    url: str
    bytes: int
    fingerprint: str
    start: int | None = None

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.url if self.start is None else f"{self.url} from byte {self.start:,}"


AnySource = Source | DatasetShard


def list_sources(config: DataConfig, split: str) -> list[AnySource]:
    """The sources of a split in their order. Raises `UserError` if any is not to be had."""
    if config.id is not None:
        return list(list_dataset_shards(config, split))
    urls = expand_urls(config.urls(split))
    if any(map(is_url, urls)):
        with ThreadPoolExecutor(_THREADS) as pool:
            files = list(pool.map(describe_source, urls))
    else:
        files = [describe_source(url) for url in urls]
    whole = config.text_documents != "line"  # a part begins with a line
    return [
        part
        for file in files
        for part in ([file] if whole and format_of(file.url)[0] == ".txt" else split_source(file, config.split_bytes))
    ]


def split_source(file: Source, part_bytes: int) -> list[Source]:
    """Parts of a large file that can be read in parts; they depend on nothing but its size and `part_bytes`."""
    extension, compression = format_of(file.url)
    if compression or extension not in _BY_LINES or file.bytes <= part_bytes:
        return [file]
    starts = range(0, file.bytes, part_bytes)
    return [replace(file, start=start, bytes=min(part_bytes, file.bytes - start)) for start in starts]


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
    folders = [name for name in missing if os.path.isdir(name)]
    if folders:
        name = folders[0].rstrip("/")
        raise UserError(f"{folders[0]}: is a folder; name the files in it, such as '{name}/*.jsonl'")
    if missing:
        raise FilesMissingError("no such file: " + ", ".join(missing))
    repeated = sorted(name for name, count in Counter(found).items() if count > 1)
    if repeated:
        raise UserError("named more than once: " + ", ".join(repeated))
    for name in found:
        format_of(name)
    return found


class FilesMissingError(UserError):
    """Input files that are not there; a finished cache can do without them."""


def _matches(name: str) -> list[str]:
    if not is_url(name) and os.path.isfile(name):
        return [name]
    with told(name, "read"):
        fs, path = open_fs(name)
        if _is_file(fs, path):  # first, since a name may hold a glob's signs
            return [name]
        if not any(sign in path for sign in "*?["):
            return []
        try:
            found = [entry for entry, info in fs.glob(path, detail=True).items() if info["type"] == "file"]
        except FileNotFoundError:  # the bucket
            return []
        return sorted(fs.unstrip_protocol(match) if is_url(name) else match for match in found)


def _is_file(fs: Any, path: str) -> bool:
    """Not fsspec's `isfile`, which says no to whatever it may not look at."""
    try:
        return bool(fs.info(path)["type"] == "file")
    except FileNotFoundError as error:
        if not is_missing(error):
            raise
        return False


def describe_source(url: str) -> Source:
    """Size and fingerprint of one file, reading its two ends."""
    with told(url, "read"):
        if is_url(url):
            fs, path = open_fs(url)
            size = fs.info(path)["size"]
            opened = fs.open(path, "rb")
        else:
            size = os.path.getsize(url)
            opened = open(url, "rb")  # noqa: SIM115  # closed below, where both kinds of file are
        if size is None:
            raise UserError(f"{url}: its server does not say how large it is; download it, and name the local file")
        digest = hashlib.sha256(str(size).encode())
        with opened as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return Source(url, int(size), digest.hexdigest()[:16])


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
