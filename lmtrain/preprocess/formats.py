"""Text file formats: each is a function from an open file to numbered records.

    .jsonl    one JSON object per line, numbered by line; blank lines are skipped
    .json     the same; or objects and arrays of objects, one after another over any lines, numbered from 1
    .txt      one document per line, without its line break, numbered by line; blank lines are skipped. Depending on
              `data.text_documents`: a block between blank lines, or the entire file, numbered by its first line
    .parquet  one document per row, numbered from 1
    .arrow    the same; a file or a stream of Arrow's IPC format, as the datasets library saves it

A record that cannot be parsed is a `BadRecordError` in its place, and reading continues after it. One that is longer
than a `RecordLimit` is a bad one as well, and is not held in memory.
"""

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import IO, Any

from lmtrain.preprocess.records import BadRecordError, Record, RecordReader, Texts, TokenIds, no_object, row_of_table
from lmtrain.runtime.text import likely_encoding, not_utf8, parse_json

_CHUNK_BYTES = 1 << 20
_START_BYTES = 4096
_ROWS = 256
_ARROW_FILE = b"ARROW1"
_PARQUET = b"PAR1"
_SPACE = re.compile(r"[ \t\r\n]*")
# Characters at the end of a part of a JSON text where an error may come from what is missing, such as of -Infinity.
_CUT = 16
_EXPONENT = len("e+")  # without its digits, which may be in the next part
# Records have more than their text: other keys, and escapes of up to six bytes for one.
_RECORD_BYTES = 16
_LEAST_LIMIT, _MOST_LIMIT = 1 << 20, 1 << 30


class UnreadableError(Exception):
    """Why the rest of a file cannot be read; `number` is that of the record where it starts, or None."""

    def __init__(self, reason: str, number: int | None = None):
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class RecordLimit:
    """The maximum size of a record in a file, which follows from `data.max_document_bytes`; None: of no config."""

    max_document_bytes: int | None = None

    @property
    def bytes(self) -> int:
        if self.max_document_bytes is None:
            return _MOST_LIMIT
        return max(_LEAST_LIMIT, _RECORD_BYTES * self.max_document_bytes)

    def error(self) -> BadRecordError:
        """What is wrong with a longer record."""
        reason = f"a record of more than {self.bytes:,} bytes"
        if self.max_document_bytes is None:
            return BadRecordError(f"{reason}, which is the limit")
        limit = f"{self.max_document_bytes:,}, of which a record may have {_RECORD_BYTES} times as much"
        return BadRecordError(f"{reason} is too long for data.max_document_bytes {limit}")


def read_jsonl(file: IO[bytes], reader: RecordReader, limit: RecordLimit) -> Iterator[Record]:
    """A record for each line of JSON, with the number of its line."""
    for number, line in enumerate(_lines(file, limit), start=1):
        if isinstance(line, BadRecordError):
            yield number, line
        elif line.strip():
            record = _parsed(line)
            if line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                reason = record if isinstance(record, BadRecordError) else no_object(reader)
                is_chat = isinstance(record, list) and any(isinstance(m, dict) and "role" in m for m in record)
                advice = 'write {"messages": [...]}' if is_chat else "it looks like a JSON array: name the file .json"
                record = BadRecordError(f"{reason}; {advice}")
            yield number, record


def _lines(file: IO[bytes], limit: RecordLimit, start: bytes = b"") -> Iterator[bytes | BadRecordError]:
    """The lines of a file, of which `start` has been read; an error in the place of one longer than the limit."""
    while line := start if start.endswith(b"\n") else start + file.readline(limit.bytes + 1 - len(start)):
        start = b""
        if len(line) <= limit.bytes:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_CHUNK_BYTES)
        yield limit.error()


def _parsed(content: bytes) -> Any:
    try:
        return parse_json(content)
    except UnicodeDecodeError as error:
        return BadRecordError(not_utf8(error))
    except ValueError as error:
        return BadRecordError(f"not JSON: {error}")


def read_txt(file: IO[bytes], reader: RecordReader, limit: RecordLimit) -> Iterator[Record]:
    """Documents of plain text, divided by `data.text_documents`, with the number of their first line."""
    if isinstance(reader, TokenIds):
        raise UnreadableError("a .txt holds text, but the passthrough tokenizer requires token ids")
    if not isinstance(reader, Texts):
        raise UnreadableError("a .txt holds text without fields; use .jsonl, or remove data.format")
    unit, first, size = reader.text_documents, 0, 0
    lines: list[str] = []

    def document() -> Any:
        return {reader.key: "\n".join(lines)} if size <= limit.bytes else limit.error()

    for number, line in _txt_lines(file, limit, unit):
        if isinstance(line, BadRecordError):
            yield number, line
            continue
        if line.strip() or (size and unit == "file"):
            first = first if size else number
            size += len(line) + 1
            if size <= limit.bytes:
                lines.append(line)
            else:
                lines.clear()
        if size and (unit == "line" or (unit == "blank_line" and not line.strip())):
            yield first, document()
            size, lines = 0, []
    if size:
        yield first, document()


def _txt_lines(file: IO[bytes], limit: RecordLimit, unit: str) -> Iterator[tuple[int, str | BadRecordError]]:
    """Every line without its break and without a byte order mark."""
    for number, line in enumerate(_lines(file, limit), start=1):
        if isinstance(line, BadRecordError):
            yield number, line
            continue
        if (zeros := line.count(0)) and not line.strip(b"\0\r\n"):
            yield number, BadRecordError(f"{zeros:,} zero bytes, as in a file that was not written to its end")
            continue
        if number == 1 and unit != "file" and b"\r" in line.strip() and not line.endswith(b"\n"):
            yield number, BadRecordError("lines end in CR without LF; convert them with `tr '\\r' '\\n' < OLD > NEW`")
            continue
        try:
            if number == 1:
                _check_zeros(line)
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, BadRecordError(not_utf8(error))


def _check_zeros(content: bytes) -> None:
    """Raise UnicodeDecodeError for UTF-16 without a mark at its start, of which English text is UTF-8 as well."""
    if b"\0" in content and (encoding := likely_encoding(content)):
        reason = f"a zero byte, as in {encoding},"
        raise UnicodeDecodeError("utf-8", content, content.index(0), len(content), reason)


def read_json(file: IO[bytes], reader: RecordReader, limit: RecordLimit) -> Iterator[Record]:
    """Records of a .json file: of its lines if the first one is a JSON value, else of its objects and arrays.

    What is not divided by lines is read in chunks, so that its size does not matter.
    """
    blank, start = 0, file.readline(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while start and not start.strip():
        blank, start = blank + start.endswith(b"\n"), file.readline(_CHUNK_BYTES)
    if not start:
        return
    if not start.lstrip().startswith(b"["):
        lines = _lines(file, limit, start)
        first = next(lines)
        if isinstance(first, BadRecordError) or not isinstance(_parsed(first), BadRecordError):
            for number, line in enumerate(chain([first], lines), start=blank + 1):
                if isinstance(line, BadRecordError) or line.strip():
                    yield number, line if isinstance(line, BadRecordError) else _parsed(line)
            return
        start = first
    yield from enumerate(_records(_JsonText(start, blank + 1, file, limit)), start=1)


def _records(text: "_JsonText") -> Iterator[Any]:
    """The objects of a text, and the items of its arrays."""
    while text.peek():
        if not text.accept("["):
            yield text.value()
        elif not text.accept("]"):
            yield text.value()
            while not text.accept("]"):
                if not text.accept(","):
                    raise text.error("Expecting ',' delimiter")
                yield text.value()


class _JsonText:
    """JSON values of a file whose beginning `start`, in line `line`, has been read. Holds one value and one chunk."""

    def __init__(self, start: bytes, line: int, file: IO[bytes], limit: RecordLimit):
        self._decoder = json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._file, self._limit = file, limit
        self._text, self._at, self._ended = "", 0, False
        self._line, self._column = line, 1  # of the first character of `_text`
        self._number = 1  # of the next value
        self._start = b""
        self._add(start)

    def peek(self) -> str:
        """The next character that is not white space, "" at the end."""
        while True:
            self._at = _end_of_space(self._text, self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._add(self._file.read(_CHUNK_BYTES))

    def accept(self, sign: str) -> bool:
        """Whether `sign` is next; if so, it is passed."""
        found = self.peek() == sign
        self._at += found
        return found

    def value(self) -> Any:
        """The next value. Raises `UnreadableError`."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) - _EXPONENT or self._ended:
                    self._at = end
                    self._number += 1
                    return value
            except RecursionError:
                raise self.error("nested too deeply") from None
            except json.JSONDecodeError as error:  # the rest of a value may be in the next chunk
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self._text) - _CUT
                if self._ended or not is_cut:
                    raise self.error(error.msg, error.pos) from None
            except ValueError as error:  # of a number, which more digits do not help
                raise self.error(str(error)) from None
            if len(self._text) - self._at > self._limit.bytes:
                raise UnreadableError(str(self._limit.error()), self._number)
            # as much again, so that a long value is not parsed for each chunk
            self._add(self._file.read(max(_CHUNK_BYTES, len(self._text) - self._at)))

    def error(self, reason: str, at: int | None = None) -> UnreadableError:
        """Why the value at position `at` of the text, by default the next one, is not JSON."""
        line, column = self._place(self._at if at is None else at)
        try:
            _check_zeros(self._start)
        except UnicodeDecodeError as error:
            return UnreadableError(not_utf8(error), self._number)
        return UnreadableError(f"not JSON: {reason}: line {line}, column {column}", self._number)

    def _add(self, chunk: bytes) -> None:
        if len(self._start) < _START_BYTES:
            self._start += chunk
        self._line, self._column = self._place(self._at)
        try:
            self._text = self._text[self._at :] + self._utf8.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise UnreadableError(not_utf8(error), self._number) from None
        self._at, self._ended = 0, not chunk

    def _place(self, at: int) -> tuple[int, int]:
        line, start = self._text.count("\n", 0, at), self._text.rfind("\n", 0, at)
        return self._line + line, self._column + at if start < 0 else at - start


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None
    return found.end()


def read_parquet(file: IO[Any], reader: RecordReader, limit: RecordLimit) -> Iterator[Record]:
    """One record for each row, with the number of its row."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file, buffer_size=_CHUNK_BYTES)  # otherwise columns of a row group are read at once
        _check_one_parquet(file, table.metadata)
        present = table.schema_arrow.names
        columns = _columns(present, reader)
        groups = map(table.metadata.row_group, range(table.metadata.num_row_groups))
        rows = _rows_at_once(sum(group.total_byte_size for group in groups), table.metadata.num_rows, limit)
        batches = table.iter_batches(batch_size=rows, columns=columns)
        yield from enumerate(chain.from_iterable(map(row_of_table, batch.to_pylist()) for batch in batches), start=1)
    except BadRecordError as error:
        raise UnreadableError(str(error)) from None
    except pyarrow.ArrowException as error:
        raise UnreadableError(f"corrupt, or not Parquet: {error}") from None


def _columns(present: list[str], reader: RecordReader) -> list[str]:
    """The columns to read. Raises `BadRecordError` if some are missing, or there are several of a name."""
    reader.check_keys(present)
    columns = list(filter(reader.reads, present))
    if repeated := [column for column in columns if present.count(column) > 1]:
        raise BadRecordError(f"{present.count(repeated[0])} columns have the name {repeated[0]!r}; rename all but one")
    return columns


def _check_one_parquet(file: IO[Any], metadata: Any) -> None:
    """Raise `UnreadableError` for files that were joined, such as by `cat`: only one of them would be read."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    starts = [(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.total_compressed_size) for chunk in chunks]
    size = file.seek(0, os.SEEK_END)
    before = size - 8 - metadata.serialized_size - max((start + length for start, length in starts), default=4)
    if before > 8:  # bytes that the metadata does not describe, here of the files before
        file.seek(before - len(_PARQUET))
        if file.read(2 * len(_PARQUET)) == 2 * _PARQUET:
            raise UnreadableError(
                "several Parquet files in one, of which only a part would be read; keep them separate"
            )


def read_arrow(file: IO[Any], reader: RecordReader, limit: RecordLimit) -> Iterator[Record]:
    """One record for each row, with the number of its row."""
    import pyarrow

    source = pyarrow.PythonFile(file, mode="r")
    try:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        file.seek(0)
        if is_file:
            table = pyarrow.ipc.open_file(source)
            batches: Iterable[Any] = map(table.get_batch, range(table.num_record_batches))
        else:
            batches = table = pyarrow.ipc.open_stream(source)
        present = table.schema.names
        columns = _columns(present, reader)
        selected = (batch.select(columns) for batch in batches)
        yield from enumerate(chain.from_iterable(_rows_of(batch, limit) for batch in selected), start=1)
        if not is_file and file.read(1):
            raise UnreadableError("more bytes after the end of its stream; keep files that were joined separate")
    except BadRecordError as error:
        raise UnreadableError(str(error)) from None
    except pyarrow.ArrowException as error:
        raise UnreadableError(f"corrupt, or not Arrow: {error}") from None


def _rows_of(batch: Any, limit: RecordLimit) -> Iterator[Any]:
    rows = _rows_at_once(batch.nbytes, batch.num_rows, limit)
    parts = (batch.slice(start, rows).to_pylist() for start in range(0, batch.num_rows, rows))
    return map(row_of_table, chain.from_iterable(parts))


def _rows_at_once(size: int, rows: int, limit: RecordLimit) -> int:
    """How many of `rows` rows of `size` bytes to hold in memory at once."""
    return max(1, min(_ROWS, limit.bytes * rows // max(size, 1)))


READERS: dict[str, Callable[[IO[Any], RecordReader, RecordLimit], Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".txt": read_txt,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
