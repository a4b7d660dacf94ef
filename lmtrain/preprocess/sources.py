"""Input files: finding them, and reading their documents one by one."""

import hashlib
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import fsspec
import zstandard
from braceexpand import braceexpand
from fsspec.compression import compr

from lmtrain.config.errors import UserError
from lmtrain.preprocess.zstd import ZstdReader

_EXTENSIONS = (".jsonl",)
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Source:
    """One input file. `fingerprint` covers its size and its first and last 64 KB: enough to notice a change."""

    url: str
    bytes: int
    fingerprint: str


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
        _format_of(name)
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


class DocumentReader:
    """Iterates over (line number, text) of a JSONL file. `position` is how many bytes of the file have been read."""

    def __init__(self, url: str, text_key: str):
        self.url = url
        self.text_key = text_key
        self._raw: IO[Any] | None = None

    @property
    def position(self) -> int:
        return 0 if self._raw is None else self._size if self._raw.closed else self._raw.tell()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Blank lines are no documents. Anything else that is not an object with the key is a `UserError`."""
        compression = _format_of(self.url)
        fs, path = fsspec.core.url_to_fs(self.url)
        number = 0
        self._size = int(fs.size(path))
        with fs.open(path, "rb") as raw:
            self._raw = raw
            lines = _decompress(raw, compression)
            try:
                for number, line in enumerate(lines, start=1):  # named in the error below
                    if line.strip():
                        yield number, self._text(number, line)
            except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
                raise UserError(f"{self.url}: damaged after line {number}: {error}") from None

    def _text(self, number: int, line: bytes) -> str:
        place = f"{self.url}:{number}"
        try:
            document = json.loads(line)
        except UnicodeDecodeError as error:
            raise UserError(f"{place}: not UTF-8: {error.reason} at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place}: not JSON: {error}") from None
        if not isinstance(document, dict):
            raise UserError(f"{place}: expected a JSON object with the key {self.text_key!r}")
        if self.text_key not in document:
            keys = ", ".join(map(repr, list(document)[:8])) or "none"
            raise UserError(f"{place}: no key {self.text_key!r} (it has {keys}); data.text_key names the key")
        text = document[self.text_key]
        if not isinstance(text, str):
            raise UserError(f"{place}: {self.text_key!r} is {type(text).__name__}, not text")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
                raise UserError(f"{place}: not UTF-8: {error.reason} at character {error.start}") from None
        return text


def _decompress(raw: IO[Any], compression: str | None) -> IO[Any]:
    """A binary stream to read lines from."""
    if compression == "zstd":
        return io.BufferedReader(ZstdReader(raw))
    return compr[compression](raw, mode="rb") if compression else raw


def _format_of(url: str) -> str | None:
    """The compression of a readable file, None if plain. Raises `UserError` for a format lmtrain does not read."""
    stem, extension = os.path.splitext(url)
    compression = _COMPRESSIONS.get(extension)
    if compression:
        extension = os.path.splitext(stem)[1]
    if extension not in _EXTENSIONS:
        readable = ", ".join([*_EXTENSIONS, *(f".jsonl{end}" for end in _COMPRESSIONS)])
        raise UserError(f"{url}: not a format lmtrain reads ({readable})")
    return compression
