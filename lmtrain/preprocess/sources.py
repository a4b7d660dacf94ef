"""Sources of a split: files, or the shards of a Hugging Face dataset; and what identifies their contents."""

import functools
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import IO, Any

from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TokensFormat
from lmtrain.data.token_file import sample_checksum
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.hf_dataset import DatasetShard, dataset_splits, list_dataset_shards
from lmtrain.preprocess.input_files import FilesMissingError, expand_urls, format_of
from lmtrain.preprocess.token_sources import (
    TokenSource,
    find_layout,
    find_shards,
    is_cache,
    is_in_place,
    warn_of_settings,
)
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import find_masked, redact
from lmtrain.runtime.remote import open_fs, remote_errors
from lmtrain.runtime.storage import is_url, read_range
from lmtrain.runtime.text import binary_name, lfs_pointer, web_page

_SAMPLE_BYTES = 4096
_READ_BYTES = 1 << 22
# What stores call the checksum, version or time of a file, the best first.
_VERSIONS = ("md5Hash", "crc32c", "Content-MD5", "Digest", "ETag", "LastModified", "Last-Modified", "mtime", "created")
_THREADS = 32
_SHOWN = 3

# Formats that can be read in parts: a line belongs to the part in which it starts.
_BY_LINES = (".jsonl", ".txt")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One input file, or its part from byte `start`; `bytes` is the size of the part.

    `fingerprint` covers the file's size and its first and last 4 KB. `modified` is the time of its last change in ns,
    or the version of a file at a URL; None if it is unknown.
    """

    url: str
    bytes: int
    fingerprint: str
    start: int | None = None
    modified: int | str | None = None

    @property
    def label(self) -> str:
        """Name of the source in messages."""
        url = redact(self.url)
        return url if self.start is None else f"{url} from byte {self.start:,}"


AnySource = Source | DatasetShard | TokenSource


def as_recorded(source: AnySource) -> dict[str, Any]:
    """A source as in manifests: without secrets in its URL, so that a renewed signature does not change it."""
    return source.recorded if isinstance(source, TokenSource) else redact(asdict(source))


def as_recorded_in(source: AnySource, cached: Mapping[str, Any] | None) -> dict[str, Any]:
    """A source as it would be recorded in the place of `cached`: equal but for its folder if its content is the same.

    A file that was changed since, or is another one, is read: completely if it is local and has the same path, else
    parts of it. Sources in caches of earlier versions have neither times nor checksums, which are not compared then.
    """
    recorded = as_recorded(source)
    if cached is not None and isinstance(source, DatasetShard):
        same_time = {"modified": cached["modified"]} if "modified" in cached else {}
        return {name: value for name, value in recorded.items() if name in cached} | same_time
    if not isinstance(source, Source) or cached is None:
        return recorded
    known = {name: value for name, value in recorded.items() if name not in ("url", "modified")}
    if any(cached.get(name) != value for name, value in known.items()):
        return recorded
    is_same = recorded["url"] == cached["url"]
    names = [name for name in ("sample", "sha256") if name in cached and (is_same or name == "sample")]
    if names and (not is_same or cached.get("modified") != source.modified):
        if is_same and not source.start:  # once for each file
            log.info(f"{source.label}: modified since it was cached, comparing its content")
        checksums = source_checksums(source, is_same)
        if any(cached[name] != checksums[name] for name in names if name in checksums):
            return recorded
    return {**cached, "url": recorded["url"]}


@functools.cache
def source_checksums(source: Source, complete: bool = True) -> dict[str, str]:
    """The checksum `sample` of parts of a file, and the one `sha256` of all bytes of a local source if `complete`."""
    read = partial(read_range, source.url)
    with remote_errors(source.url, "read"):
        size = source.bytes if source.start is None else source.start + source.bytes
        checksums = {"sample": sample_checksum(size, read)[:16]}
        if not complete or is_url(source.url):
            return checksums
        digest, start = hashlib.sha256(), source.start or 0
        for begin in range(start, size, _READ_BYTES):
            digest.update(read(begin, min(begin + _READ_BYTES, size)))
    return checksums | {"sha256": digest.hexdigest()}


def list_sources(config: DataConfig, split: str, tokenizer: Tokenizer) -> list[AnySource]:
    """Sources of a split in order. Raises `UserError` if any is missing or unavailable."""
    if config.id is not None:
        return list(list_dataset_shards(config, config.dataset_split(split)))
    written = config.urls(split)
    try:
        if masked := find_masked(written):
            raise FilesMissingError(
                f"the secrets of {written[int(masked[0][0])]} are masked, since they are not saved with a run; use the "
                "config that the run was started with (after --run ID, add it as CONFIG)"
            )
        urls = expand_urls(written, isinstance(config.format, TokensFormat))
    except FilesMissingError as error:
        setting = {"train": "train_urls", "validation": "validation_urls"}[split]
        raise FilesMissingError(f"data.{setting}: {error}") from None
    describe = partial(_describe, config, tokenizer)
    if any(map(is_url, urls)):
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = list(pool.map(describe, urls))
    else:  # local files need no threads, each of which takes memory
        parts = list(map(describe, urls))
    sources = list(chain.from_iterable(parts))
    in_place = [source for source in sources if isinstance(source, TokenSource)]
    if config.validation_fraction is not None and in_place:
        raise UserError(
            f"data.validation_fraction: {in_place[0].label} is read in place, so none of it can be held out; set "
            "validation_urls to another file"
        )
    if isinstance(config.format, TokensFormat):
        warn_of_settings(config, sources)
    _warn_of_copies(sources)
    return sources


def _warn_of_copies(sources: Sequence[AnySource]) -> None:
    """Warn of files that are probably copies, which would be read twice."""
    by_content: dict[str, list[str]] = {}
    for source in sources:
        if isinstance(source, Source) and source.bytes and not source.start:
            by_content.setdefault(source.fingerprint, []).append(redact(source.url))
    copies = [" = ".join(urls) for urls in by_content.values() if len(urls) > 1]
    if copies:
        more = f" and {len(copies) - _SHOWN} more" if len(copies) > _SHOWN else ""
        log.warning(f"same size, start and end, all are read: {', '.join(copies[:_SHOWN])}{more}")


def _describe(config: DataConfig, tokenizer: Tokenizer, url: str) -> Sequence[AnySource]:
    """The sources that a file or, of token ids, a folder consists of."""
    if isinstance(config.format, TokensFormat):
        if is_cache(url):
            return find_shards(url, tokenizer)
        if is_in_place(url):
            with remote_errors(url, "read"):
                return [find_layout(url, config, tokenizer)]
    file = describe_source(url)
    unsplit = config.text_documents != "line"  # parts are split at lines
    return [file] if unsplit and format_of(url)[0] == ".txt" else split_source(file, config.split_bytes)


def split_source(file: Source, part_bytes: int) -> list[Source]:
    """Split a large file into parts, which depend only on its size and `part_bytes`; other files stay in one part."""
    extension, compression = format_of(file.url)
    if compression or extension not in _BY_LINES or file.bytes <= part_bytes:
        return [file]
    starts = range(0, file.bytes, part_bytes)
    return [replace(file, start=start, bytes=min(part_bytes, file.bytes - start)) for start in starts]


def describe_urls(config: DataConfig, split: str) -> list[str]:
    """Sources of a split as written in the config, without secrets; stored in the manifest of a finished cache."""
    if config.id is not None:
        name = config.dataset_split(split)
        return [f"dataset {config.id} {config.name or ''} {name}{' (stream)' if config.stream else ''}"]
    return redact(config.urls(split))


def has_text(config: DataConfig, split: str) -> bool:
    """Whether the config has text for a split. A dataset may lack `validation`."""
    if config.id is not None:
        return (
            split == "train"
            or config.validation_split is not None
            or config.dataset_split(split) in dataset_splits(config)
        )
    return bool(config.urls(split))


def open_source(url: str) -> IO[Any]:
    """A file, to read its bytes."""
    if not is_url(url):
        return open(url, "rb")
    fs, path = open_fs(url)
    return io.BufferedReader(fs.open(path, "rb"))  # since fsspec's files read a line of any length


def describe_source(url: str) -> Source:
    """Size and fingerprint of one file, from its first and last bytes. Raises `UserError` if it is another file."""
    with remote_errors(url, "read"):
        size, modified = _size_and_version(url)
        if size is None:
            raise UserError(
                f"{url}: the server does not report the file size; download the file and use the local path"
            )
        digest = hashlib.sha256(str(size).encode())
        with open_source(url) as file:
            digest.update(start := file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    if (reason := _no_data(url, start)) is not None:
        raise reason
    return Source(url=url, bytes=size, fingerprint=digest.hexdigest()[:16], modified=modified)


def _size_and_version(url: str) -> tuple[int | None, int | str | None]:
    if not is_url(url):
        status = os.stat(url)
        return status.st_size, status.st_mtime_ns
    fs, path = open_fs(url)
    info = fs.info(path)
    version = next((f"{name} {info[name]}" for name in _VERSIONS if info.get(name)), None)
    return (None if info["size"] is None else int(info["size"])), version


def version_of(source: AnySource) -> int | str | None:
    """The present value of `Source.modified`; None of other sources."""
    if not isinstance(source, Source):
        return None
    with remote_errors(source.url, "read"):
        return _size_and_version(source.url)[1]


def _no_data(url: str, start: bytes) -> UserError | None:
    """The error of a file whose first bytes show that it is another one than its name says."""
    if reason := lfs_pointer(start):
        return FilesMissingError(f"{url}: {reason}")
    extension, compression = format_of(url)
    reason = None if extension == ".txt" and compression is None else web_page(start)  # its text may be HTML
    named = binary_name(start)
    if extension in (".jsonl", ".json", ".txt") and compression is None and named is not None:
        reason = f"its content is that of a {named}; rename it if its format is supported"
    return UserError(f"{url}: {reason}") if reason else None
