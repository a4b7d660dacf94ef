"""Sources of a split: files, expanded from braces and globs, or the shards of a Hugging Face dataset."""

import hashlib
import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import IO, Any

from braceexpand import braceexpand

from lmtrain.config.errors import UserError
from lmtrain.config.redact import find_masked, redact
from lmtrain.config.remote import is_missing, open_fs, remote_errors, without_query
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TokensFormat
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.hf_dataset import DatasetShard, dataset_splits, list_dataset_shards
from lmtrain.preprocess.token_sources import EXTENSIONS, TokenSource, find_layout, find_shards, is_cache, is_in_place
from lmtrain.runtime.storage import is_url

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_UNCOMPRESSED = (".parquet", ".arrow")
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
        url = redact(self.url)
        return url if self.start is None else f"{url} from byte {self.start:,}"


AnySource = Source | DatasetShard | TokenSource


def as_recorded(source: AnySource) -> dict[str, Any]:
    """A source as in manifests: without secrets in its URL, so that a renewed signature does not change it."""
    return source.recorded if isinstance(source, TokenSource) else redact(asdict(source))


def list_sources(config: DataConfig, split: str, tokenizer: Tokenizer) -> list[AnySource]:
    """Sources of a split in order. Raises `UserError` if any is missing or unavailable."""
    if config.id is not None:
        return list(list_dataset_shards(config, split))
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
    return list(chain.from_iterable(parts))


def _describe(config: DataConfig, tokenizer: Tokenizer, url: str) -> Sequence[AnySource]:
    """The sources that a file or, of token ids, a folder consists of."""
    if isinstance(config.format, TokensFormat):
        if is_cache(url):
            return find_shards(url, tokenizer)
        if is_in_place(url):
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
        return [f"dataset {config.id} {config.name or ''} {split}{' (stream)' if config.stream else ''}"]
    return redact(config.urls(split))


def has_text(config: DataConfig, split: str) -> bool:
    """Whether the config has text for a split. A dataset may lack `validation`."""
    if config.id is not None:
        return split == "train" or split in dataset_splits(config)
    return bool(config.urls(split))


def expand_urls(urls: list[str], of_tokens: bool = False) -> list[str]:
    """Expand braces, then globs, in the order written. Raises `UserError` with all URLs that match nothing.

    `of_tokens`: they may also be files of token ids, and folders of token caches.
    """
    files: list[str] = []
    missing: list[str] = []
    for url in urls:
        try:
            names = list(braceexpand(os.path.expanduser(url)))
        except ValueError:  # UnbalancedBracesError, which the package does not export to type checkers
            raise UserError(f"{url}: unbalanced braces") from None
        for name in names:
            matches = [name] if of_tokens and is_cache(name) else _matches(name)
            files.extend(matches)
            if not matches:
                missing.append(name)
    folders = [name for name in missing if os.path.isdir(name)]
    if folders:
        name = folders[0].rstrip("/")
        raise UserError(f"{folders[0]}: is a folder; set the files in it, such as '{name}/*.jsonl'")
    if missing:
        raise FilesMissingError("no such file: " + ", ".join(map(_with_similar, missing)))
    by_file: dict[str, list[str]] = {}
    for name in files:
        by_file.setdefault(name if is_url(name) else os.path.realpath(name), []).append(name)
    repeated = sorted(" = ".join(dict.fromkeys(names)) for names in by_file.values() if len(names) > 1)
    if repeated:
        raise UserError("listed more than once: " + ", ".join(repeated))
    for name in files:
        if not of_tokens or not (is_in_place(name) or is_cache(name)):
            format_of(name)
    return files


class FilesMissingError(UserError):
    """Input files that are missing, or whose secrets are; a finished cache does not need them."""


def _with_similar(name: str) -> str:
    """A missing file, with the one that may be meant: Megatron-LM names its files without extension."""
    return f"{name} (but there is {name}.bin)" if not is_url(name) and os.path.isfile(f"{name}.bin") else name


def _matches(name: str) -> list[str]:
    if not is_url(name) and os.path.isfile(name):
        return [name]
    with remote_errors(name, "read"):
        fs, path = open_fs(name)
        try:  # first, since a file name may contain glob characters; not `isfile`, which hides that access is denied
            if fs.info(path)["type"] == "file":
                return [name]
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
        if not any(sign in without_query(path) for sign in "*?["):
            return []
        try:
            matches = [entry for entry, info in fs.glob(path, detail=True).items() if info["type"] == "file"]
        except FileNotFoundError:  # the bucket
            return []
        return sorted(fs.unstrip_protocol(match) if is_url(name) else match for match in matches)


def open_source(url: str) -> IO[Any]:
    """A file, to read its bytes."""
    if not is_url(url):
        return open(url, "rb")
    fs, path = open_fs(url)
    return io.BufferedReader(fs.open(path, "rb"))  # since fsspec's files read a line of any length


def describe_source(url: str) -> Source:
    """Size and fingerprint of one file, from its first and last bytes."""
    with remote_errors(url, "read"):
        if is_url(url):
            fs, path = open_fs(url)
            size = fs.info(path)["size"]
        else:
            size = os.path.getsize(url)
        if size is None:
            raise UserError(
                f"{url}: the server does not report the file size; download the file and use the local path"
            )
        digest = hashlib.sha256(str(size).encode())
        with open_source(url) as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return Source(url, int(size), digest.hexdigest()[:16])


def format_of(url: str) -> tuple[str, str | None]:
    """Extension and compression of an input file. Raises `UserError` for an unsupported format."""
    stem, extension = os.path.splitext(without_query(url))
    if extension not in READERS and extension not in COMPRESSIONS:
        stem, extension = os.path.splitext(url)  # such as download?file=a.jsonl
    compression = COMPRESSIONS.get(extension)
    if compression:
        extension = os.path.splitext(stem)[1]
    if extension not in READERS or (compression and extension in _UNCOMPRESSED):
        readable = f"{' '.join(READERS)}, and all but {' '.join(_UNCOMPRESSED)} with {' '.join(COMPRESSIONS)} after it"
        if extension == ".idx":
            raise UserError(f"{url}: an index; set the .bin next to it, with data.format: {{type: tokens}}")
        advice = f"; for files of token ids ({' '.join(EXTENSIONS)}) set data.format: {{type: tokens}}"
        raise UserError(
            f"{without_query(url)}: unsupported format (supported: {readable}"
            f"{advice if extension in EXTENSIONS else ''})"
        )
    return extension, compression
