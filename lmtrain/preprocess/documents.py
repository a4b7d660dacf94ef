"""Reading the documents of a source one by one."""

import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any

import fsspec
import zstandard
from fsspec.compression import compr

from lmtrain.config.errors import UserError
from lmtrain.preprocess.formats import READERS
from lmtrain.preprocess.hf_dataset import DatasetReader, DatasetShard
from lmtrain.preprocess.sources import AnySource, format_of
from lmtrain.preprocess.text import Record
from lmtrain.preprocess.zstd import ZstdReader

_BAD_RECORDS_TOLD = 10


class DocumentReader:
    """Iterates over (number, text) of a source; `position` is how many bytes of it have been read.

    A record that cannot be read is a `UserError` with its place, or with `skip_bad` counted in `skipped`, the first few
    described in `bad_records`. A file that is damaged is an error in any case.
    """

    def __init__(self, source: AnySource | str, text_key: str, skip_bad: bool = False):
        self.skipped = 0
        self.bad_records: list[str] = []
        self._source = source
        self._text_key = text_key
        self._skip_bad = skip_bad
        self._dataset: DatasetReader | None = None
        self._raw: IO[Any] | None = None
        self._size = 0

    @property
    def position(self) -> int:
        if self._dataset is not None:
            return self._dataset.position
        return 0 if self._raw is None else self._size if self._raw.closed else self._raw.tell()

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for number, text in self._records():
            if isinstance(text, str):
                yield number, text
            elif self._skip_bad:
                self.skipped += 1
                if len(self.bad_records) < _BAD_RECORDS_TOLD:
                    self.bad_records.append(str(text))
            else:
                raise text

    def _records(self) -> Iterator[Record]:
        if isinstance(self._source, DatasetShard):
            self._dataset = DatasetReader(self._source, self._text_key)
            yield from self._dataset
            return
        url = self._source if isinstance(self._source, str) else self._source.url
        extension, compression = format_of(url)
        fs, path = fsspec.core.url_to_fs(url)
        self._size = int(fs.size(path))
        number = 0
        with fs.open(path, "rb") as raw:
            self._raw = raw
            try:
                for number, text in READERS[extension](_decompress(raw, compression), self._text_key, url):
                    yield number, text  # named in the error below
            except (EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError) as error:
                raise UserError(f"{url}: damaged after line {number}: {error}") from None


def _decompress(raw: IO[Any], compression: str | None) -> IO[Any]:
    """A binary stream to read lines from."""
    if compression == "zstd":
        return io.BufferedReader(ZstdReader(raw))
    return compr[compression](raw, mode="rb") if compression else raw
