"""Reader of the documents of a source, one by one."""

import bz2
import functools
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any

from lmtrain.preprocess.formats import READERS, RecordLimit, UnreadableError
from lmtrain.preprocess.hf_dataset import DatasetRows, DatasetShard
from lmtrain.preprocess.input_files import format_of
from lmtrain.preprocess.records import (
    AnswerPair,
    BadRecordError,
    Document,
    EqualAnswersError,
    InstructionText,
    Record,
    RecordReader,
    Texts,
    TokenizedText,
    is_conversation,
    read_document,
)
from lmtrain.preprocess.sources import AnySource, Source, describe_source, open_source
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.remote import remote_errors
from lmtrain.runtime.storage import is_url

_BAD_RECORDS_SHOWN = 10
_KEYS_SHOWN = 20
# Equal ids at the end of a row that are probably padding.
_PADDING = 16
_CHUNK_BYTES = 1 << 22
_LONG_WINDOW = "Frame requires too much memory"


def read_texts(url: str, text_key: str) -> Iterator[str]:
    """The texts of a file. Raises `UserError` for a damaged record."""
    return (str(text) for _, text in DocumentReader(describe_source(url), Texts(text_key, advise=_advise_on_text)))


def _advise_on_text(keys: Collection[str]) -> str:
    if is_conversation(keys):
        return (
            "a tokenizer is trained on text, not on conversations: `lmtrain tokenizer extend` adds chat tokens and a "
            "template to that of a base model"
        )
    return "set --text_key to the key"


def _ends_padded(document: TokenizedText) -> bool:
    """Whether a row ends with padding that is learned."""
    ids, targets = document.ids[-_PADDING:], document.targets
    is_learned = targets is None or bool(targets[-_PADDING:].all())
    return len(document.ids) > _PADDING and is_learned and bool((ids == ids[0]).all())


def not_read(keys: Sequence[str], document: Document | None) -> str:
    """The warning about keys of records that are not read, in which a `document` was found."""
    listed = ", ".join(map(repr, keys[:_KEYS_SHOWN])) + (", ..." if len(keys) > _KEYS_SHOWN else "")
    if isinstance(document, str):
        return f"keys that are not read next to texts: {listed}; set data.format to read them"
    advice = (
        "name one that says which tokens are targets labels or loss_mask"
        if isinstance(document, TokenizedText)
        else "write what belongs to a prompt or a reply into its text, and name the other ones in "
        "data.format.ignored_fields"
    )
    return f"keys that are not read, so that nothing of them is learned: {listed}; {advice}"


class DocumentReader:
    """Iterates over (number, document) of a source. `position` is the number of its bytes read so far.

    A record that cannot be read raises a `UserError` with its location. With `skip_bad` it is counted in `skipped`
    instead, and the first few are described in `bad_records`. A corrupt file is always an error. `max_document_bytes`
    is the setting, from which the maximum size of a record follows. Only documents to `keep` are given; `documents` is
    the number of all of them.

    Pairs of equal answers are left out. It is an error, at the end, if all pairs are, or if most documents have an
    answer that starts with its prompt: then the prompt is in the answers, too, and would be learned.
    """

    def __init__(
        self,
        source: AnySource,
        reader: RecordReader,
        skip_bad: bool = False,
        max_document_bytes: int | None = None,
        keep: Callable[[Document], bool] = lambda document: True,
    ):
        self.skipped = 0
        self.bad_records: list[str] = []
        self.documents = 0
        self._equal: list[int] = []  # numbers of records
        self._repeated: list[int] = []
        self._passed_over: dict[str, None] = {}  # keys, in the order in which they were found
        self._first: Document | None = None
        self._padded: list[int] = []
        self._source = source
        self._reader = reader
        self._skip_bad = skip_bad
        self._keep = keep
        self._limit = RecordLimit(max_document_bytes)
        self._rows = DatasetRows(source) if isinstance(source, DatasetShard) else None
        self._raw: IO[Any] | None = None

    @property
    def position(self) -> int:
        if self._rows is not None:
            return self._rows.position
        if self._raw is None or self._raw.closed:
            return 0 if self._raw is None else self._source.bytes
        return self._raw.tell() - self._start

    @property
    def _start(self) -> int:
        return self._source.start or 0 if isinstance(self._source, Source) else 0

    def place(self, number: int) -> str:
        """Location of a record: `file:line`, or the nearest form that is cheap to compute."""
        if self._start and not is_url(self._source.url):
            return f"{self._source.url}:{number + self._lines_before}"
        return f"{self._source.label}:{number}"

    @functools.cached_property
    def _lines_before(self) -> int:
        """Number of lines of the file before this part."""
        left, lines = self._start - 1, 1  # a line across the border belongs to the previous part
        with open(self._source.url, "rb") as file:
            while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
                lines += chunk.count(b"\n")
                left -= len(chunk)
        return lines

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        for number, record in self._rows or self._records_of_file():
            try:
                document = read_document(self._reader, record)
                self.documents += 1
                is_first = self.documents == 1 and isinstance(record, Mapping)  # of texts, which have to be read fast
                if is_first or isinstance(document, InstructionText | AnswerPair | TokenizedText):
                    self._notice(number, record, document)
                if self._keep(document):
                    yield number, document
            except EqualAnswersError:
                self._equal.append(number)
            except BadRecordError as error:
                message = f"{self.place(number)}: {error}"
                if not self._skip_bad:
                    raise UserError(message) from None
                self.skipped += 1
                if len(self.bad_records) < _BAD_RECORDS_SHOWN:
                    self.bad_records.append(message)
            except UserError as error:  # of the template, not of the record: raised even if bad records are skipped
                raise UserError(f"{self.place(number)}: {error}") from None
        if self._equal and not self.documents:
            raise UserError(
                f"{self.place(self._equal[0])}: both answers are equal, as in all {len(self._equal):,} pairs of this "
                "source; no preference can be learned from them"
            )
        if 2 * len(self._repeated) > self.documents:
            raise UserError(
                f"{self.place(self._repeated[0])}: the answer starts with the prompt, which would be written twice and "
                f"learned, as in {len(self._repeated):,} of {self.documents:,} records of this source; remove the "
                "prompt from the answers, or, of preferences, the key of the prompt"
            )

    def _notice(self, number: int, record: Any, document: Document) -> None:
        for name, value in record.items():
            is_new = name not in self._passed_over and value not in (None, "", [], {})
            if is_new and self._reader.passes_over(name, value):
                self._passed_over[name] = None
        self._first = document if self._first is None else self._first
        if isinstance(document, TokenizedText) and _ends_padded(document):
            self._padded.append(number)
        if not isinstance(document, InstructionText | AnswerPair):
            return
        if document.repeats_prompt:
            self._repeated.append(number)
        for name in document.passed_over:
            self._passed_over[f"{name} of messages"] = None

    @property
    def passed_over(self) -> list[str]:
        """The keys so far that are not read."""
        return list(self._passed_over)

    @property
    def left_out(self) -> int:
        """The number of records so far that are left out, since nothing can be learned from them."""
        return len(self._equal)

    @property
    def warnings(self) -> list[str]:
        """What was noticed about the records that have been read, with the first of them."""
        noticed = (
            (self._equal, "{} pairs of equal answers are left out"),
            (self._repeated, f"{{}} of {self.documents:,} answers start with their prompt"),
            (self._padded, f"{{}} of {self.documents:,} rows end with {_PADDING} equal ids: add an attention_mask"),
        )
        found = [
            f"{self.place(numbers[0])}: {text.format(f'{len(numbers):,}')}; this is the first"
            for numbers, text in noticed
            if numbers
        ]
        more = not_read(self.passed_over, self._first) if self._passed_over else ""
        return found + ([f"{self._source.label}: {more}"] if more else [])

    def _records_of_file(self) -> Iterator[Record]:
        assert isinstance(self._source, Source)
        url, label = self._source.url, self._source.label
        extension, compression = format_of(url)
        number = 0
        with remote_errors(url, "read"):
            raw = open_source(url)
        with raw:
            self._raw = raw
            try:
                file = raw if self._source.start is None else _Part(raw, self._start, self._source.bytes)
                if compression and not self._source.bytes:
                    raise EOFError(f"empty, which no {compression} file is")
                reader: Any = self._reader
                if not isinstance(reader, Texts):
                    reader = _Noticing(reader, self._passed_over)
                for number, record in READERS[extension](_decompress(file, compression), reader, self._limit):
                    yield number, record  # `number` is used in the errors below
            except UnreadableError as error:
                place = label if error.number is None else self.place(error.number)
                raise UserError(f"{place}: {error}") from None
            except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                if _LONG_WINDOW in str(error):
                    raise UserError(
                        f"{label}: compressed with --long: run `zstd -d --long=31 < OLD | zstd > NEW`"
                    ) from None
                raise UserError(f"{label}: corrupt after line {number}: {error}") from None
            except Exception as error:
                with remote_errors(url, "read"):  # remote file systems raise their own error classes
                    raise error
                raise


class _Noticing:
    """A reader that notes the columns of a table that it passes over: they are not among the keys of its records."""

    def __init__(self, reader: RecordReader, passed_over: dict[str, None]):
        self._reader, self._passed_over = reader, passed_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def check_keys(self, keys: Collection[str]) -> None:
        self._reader.check_keys(keys)
        self._passed_over.update(dict.fromkeys(filter(self._reader.passes_over, keys)))


class _Part:
    """The lines of a file that start within the `size` bytes from `start`."""

    def __init__(self, raw: IO[Any], start: int, size: int):
        self._raw = raw
        self._end = start + size
        self._inside = False  # whether a line has been read in part
        if start:
            raw.seek(start - 1)
            while (line := raw.readline(_CHUNK_BYTES)) and not line.endswith(b"\n"):
                pass

    def readline(self, size: int) -> bytes:
        if not self._inside and self._raw.tell() >= self._end:
            return b""
        line: bytes = self._raw.readline(size)
        self._inside = not line.endswith(b"\n")
        return line


class _Streams(io.RawIOBase):
    """The content of compressed streams that follow one another, with zero bytes between and after them.

    The readers of bz2 and lzma take a second stream that is damaged for the end of the file.
    """

    def __init__(self, raw: IO[bytes], new: Callable[[], Any]):
        self._raw, self._new, self._decoder = raw, new, new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self._decoder.eof:
                data = self._decoder.unused_data.lstrip(b"\0")
                while not data:
                    if not (chunk := self._raw.read(_CHUNK_BYTES)):
                        return 0
                    data = chunk.lstrip(b"\0")
                self._decoder = self._new()
            elif self._decoder.needs_input and not (data := self._raw.read(_CHUNK_BYTES)):
                raise EOFError("the compressed data is truncated")
            if content := self._decoder.decompress(data, len(buffer)):
                buffer[: len(content)] = content
                return len(content)


def _decompress(raw: Any, compression: str | None) -> Any:
    """A binary stream to read lines from. Streams that are truncated, or followed by other bytes, raise an error."""
    if compression == "zstd":  # that of fsspec does not notice the end of a truncated one
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if compression is None:
        return raw
    return io.BufferedReader(_Streams(raw, {"bz2": bz2.BZ2Decompressor, "xz": lzma.LZMADecompressor}[compression]))
