"""Reader of the documents of a source, one by one."""

import functools
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any

import zstandard
from fsspec.compression import compr

from lmtrain.config.errors import UserError
from lmtrain.config.remote import open_fs, told
from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.hf_dataset import DatasetReader, DatasetShard
from lmtrain.preprocess.sources import AnySource, Source, describe_source, format_of
from lmtrain.preprocess.text import Field, InstructionReader, Record, Text
from lmtrain.preprocess.zstd import ZstdReader
from lmtrain.runtime.storage import is_url

_BAD_RECORDS_SHOWN = 10
_CHUNK_BYTES = 1 << 22


class DocumentReader:
    """Iterates over (number, text) of a source. `position` is the number of its bytes read so far.

    With `vocab_size` the documents are lists of token ids. `text_documents` is the unit of a document in a .txt file.
    `instructions` reads records that are conversations or completions.

    A record that cannot be read raises a `UserError` with its location. With `skip_bad` it is counted in `skipped`
    instead, and the first few are described in `bad_records`. A corrupt file is always an error.
    """

    def __init__(
        self,
        source: AnySource | str,
        text_key: str,
        skip_bad: bool = False,
        vocab_size: int | None = None,
        text_documents: str = "line",
        instructions: InstructionReader | None = None,
    ):
        self.skipped = 0
        self.bad_records: list[str] = []
        self._source = describe_source(source) if isinstance(source, str) else source
        self._field = Field(text_key, vocab_size, text_documents, instructions)
        self._skip_bad = skip_bad
        self._dataset: DatasetReader | None = None
        self._raw: IO[Any] | None = None
        self._start = 0
        self._size = 0

    @property
    def position(self) -> int:
        if self._dataset is not None:
            return self._dataset.position
        return 0 if self._raw is None else self._size if self._raw.closed else self._raw.tell() - self._start

    def place(self, number: int) -> str:
        """Location of a record: `file:line`, or the nearest form that is cheap to compute."""
        source = self._source
        if isinstance(source, Source) and source.start and not is_url(source.url):
            return f"{source.url}:{number + self._lines_before}"
        return f"{source.label}:{number}"

    @functools.cached_property
    def _lines_before(self) -> int:
        """Number of lines of the file before this part."""
        assert isinstance(self._source, Source)
        left, lines = (self._source.start or 0) - 1, 1  # a line across the border belongs to the previous part
        with open(self._source.url, "rb") as file:
            while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return lines

    def __iter__(self) -> Iterator[tuple[int, Text]]:
        for number, text in self._records():
            if not isinstance(text, UserError):
                yield number, text
            elif self._skip_bad:
                self.skipped += 1
                if len(self.bad_records) < _BAD_RECORDS_SHOWN:
                    self.bad_records.append(self._with_place(text, number))
            else:
                raise UserError(self._with_place(text, number))

    def _with_place(self, error: UserError, number: int) -> str:
        return str(error).replace(f"{self._source.label}:{number}", self.place(number), 1)

    def _records(self) -> Iterator[Record]:
        if isinstance(self._source, DatasetShard):
            self._dataset = DatasetReader(self._source, self._field)
            yield from self._dataset
            return
        url, label = self._source.url, self._source.label
        extension, compression = format_of(url)
        number = 0
        with told(url, "read"):
            raw = _open(url)
        with raw:
            self._raw = raw
            self._start = self._source.start or 0
            self._size = self._source.bytes
            lines = raw if self._source.start is None else _lines_of_part(raw, self._start, self._size)
            try:
                for number, text in READERS[extension](_decompress(lines, compression), self._field, label):
                    yield number, text  # `number` is used in the error below
            except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
                raise UserError(f"{label}: corrupt after line {number}: {error}") from None
            except Exception as error:
                with told(url, "read"):  # remote file systems raise their own error classes
                    raise error
                raise


def _open(url: str) -> IO[Any]:
    if not is_url(url):
        return open(url, "rb")
    fs, path = open_fs(url)
    opened: IO[Any] = fs.open(path, "rb")
    return opened


def _lines_of_part(raw: IO[Any], start: int, size: int) -> Any:
    """Lines that start within the `size` bytes from `start`."""
    if start:
        raw.seek(start - 1)
        raw.readline()
    while raw.tell() < start + size and (line := raw.readline()):
        yield line


def _decompress(raw: Any, compression: str | None) -> Any:
    """A binary stream to read lines from."""
    if compression == "zstd":
        return io.BufferedReader(ZstdReader(raw))
    return compr[compression](raw, mode="rb") if compression else raw
