"""Text file formats: each is a function from an open file to numbered records.

    .jsonl    one JSON object per line, numbered by line; blank lines are skipped
    .json     the same, or one JSON document: an object, or an array of objects, numbered from 1
    .txt      one document per line, without its line break, numbered by line; blank lines are skipped. Depending on
              `data.text_documents`: a block between blank lines, or the entire file, numbered by its first line
    .parquet  one document per row, numbered from 1
    .arrow    the same; a file or a stream of Arrow's IPC format, as the datasets library saves it

A record that cannot be parsed is a `BadRecordError` in its place, and reading continues after it.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import IO, Any

from lmtrain.config.encodings import likely_encoding, not_utf8
from lmtrain.config.json_text import parse_json
from lmtrain.preprocess.records import BadRecordError, Record, RecordReader, Texts, TokenIds, no_object
from lmtrain.preprocess.token_rows import TokenRows

_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 256
_ARROW_FILE = b"ARROW1"


class UnreadableError(Exception):
    """Why the rest of a file cannot be read; `number` is that of the record where it starts, or None."""

    def __init__(self, reason: str, number: int | None = None):
        super().__init__(reason)
        self.number = number


def read_jsonl(file: Iterable[bytes], reader: RecordReader) -> Iterator[Record]:
    """A record for each line of JSON, with the number of its line."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            record = _parsed(line)
            if line.lstrip().startswith(b"["):
                reason = record if isinstance(record, BadRecordError) else no_object(reader)
                record = BadRecordError(f"{reason}; it looks like a JSON array: name the file .json")
            yield number, record


def _parsed(content: bytes) -> Any:
    try:
        return parse_json(content)
    except UnicodeDecodeError as error:
        return BadRecordError(not_utf8(error))
    except ValueError as error:
        return BadRecordError(f"not JSON: {error}")


def read_txt(file: Iterable[bytes], reader: RecordReader) -> Iterator[Record]:
    """Documents of plain text, divided by `data.text_documents`, with the number of their first line."""
    if isinstance(reader, TokenIds):
        raise UnreadableError("a .txt holds text, but the passthrough tokenizer requires token ids")
    if not isinstance(reader, Texts):
        raise UnreadableError("a .txt holds text without fields; use .jsonl, or remove data.format")
    unit, first = reader.text_documents, 0
    lines: list[str] = []
    for number, line in _txt_lines(file):
        if isinstance(line, BadRecordError):
            yield number, line
            continue
        if line.strip() or (lines and unit == "file"):
            first = first if lines else number
            lines.append(line)
        if lines and (unit == "line" or (unit == "blank_line" and not line.strip())):
            yield first, {reader.key: "\n".join(lines)}
            lines = []
    if lines:
        yield first, {reader.key: "\n".join(lines)}


def _txt_lines(file: Iterable[bytes]) -> Iterator[tuple[int, str | BadRecordError]]:
    """Every line without its break and without a byte order mark."""
    for number, line in enumerate(file, start=1):
        try:
            if number == 1 and b"\0" in line and (encoding := likely_encoding(line)):
                # without a mark at its start, UTF-16 of English text is UTF-8 as well
                raise UnicodeDecodeError("utf-8", line, line.index(0), len(line), f"a zero byte, as in {encoding},")
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, BadRecordError(not_utf8(error))


def read_json(file: IO[Any], reader: RecordReader) -> Iterator[Record]:
    """Records of a .json file. An array is read in chunks, so that its size does not matter."""
    first = next((line for line in file if line.strip()), b"")
    if first.lstrip().startswith(b"["):
        yield from enumerate(_array_items(first, file), start=1)
        return
    try:
        parse_json(first or b"{}")
    except ValueError:  # one object over several lines
        yield 1, _parsed(first + file.read())
    else:
        yield from read_jsonl(chain([first], file), reader)


def read_parquet(file: IO[Any], reader: RecordReader) -> Iterator[Record]:
    """One record for each row, with the number of its row."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        columns = _columns(reader, table.schema_arrow)
        batches = table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns)
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)
    except BadRecordError as error:
        raise UnreadableError(str(error)) from None
    except pyarrow.ArrowException as error:
        raise UnreadableError(f"corrupt, or not Parquet: {error}") from None


def read_arrow(file: IO[Any], reader: RecordReader) -> Iterator[Record]:
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
        columns = _columns(reader, table.schema)
        yield from enumerate(chain.from_iterable(batch.select(columns).to_pylist() for batch in batches), start=1)
    except BadRecordError as error:
        raise UnreadableError(str(error)) from None
    except pyarrow.ArrowException as error:
        raise UnreadableError(f"corrupt, or not Arrow: {error}") from None


def _columns(reader: RecordReader, schema: Any) -> list[str]:
    """The columns to read. Raises `BadRecordError` if there is no document."""
    from pyarrow import types

    reader.check_keys(schema.names)
    wanted = set(reader.columns)
    if isinstance(reader, TokenRows) and reader.reads_all:
        kinds = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        wanted |= {field.name for field in schema if any(is_kind(field.type) for is_kind in kinds)}
    return [column for column in schema.names if column in wanted]


READERS: dict[str, Callable[[IO[Any], RecordReader], Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".txt": read_txt,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}


def _array_items(first: bytes, file: IO[Any]) -> Iterator[Any]:
    """Items of a JSON array whose first line has been read; holds one item and one chunk in memory."""
    decoder = json.JSONDecoder()
    number, text, pending = 0, "", first.lstrip()[1:]
    ended = False
    while True:
        try:  # a chunk may end inside a character
            text += pending.decode()
            pending = b""
        except UnicodeDecodeError as error:
            if len(pending) - error.start > 3 or ended:
                raise UnreadableError(not_utf8(error), number + 1) from None
            text += pending[: error.start].decode()
            pending = pending[error.start :]
        while True:
            text = text.lstrip(" \t\r\n").removeprefix(",").lstrip(" \t\r\n") if number else text.lstrip(" \t\r\n")
            if text.startswith("]"):
                return
            try:
                item, end = decoder.raw_decode(text)
            except RecursionError:
                raise UnreadableError("not JSON: nested too deeply", number + 1) from None
            except ValueError as error:  # the rest of an item may be in the next chunk, which does not help a number
                if ended or not isinstance(error, json.JSONDecodeError):
                    raise UnreadableError(f"not JSON: {getattr(error, 'msg', error)}", number + 1) from None
                break
            if end == len(text) and not ended:
                break  # a number may continue in the next chunk
            number += 1
            text = text[end:]
            yield item
        chunk = file.read(_CHUNK_BYTES)
        ended = not chunk
        pending += chunk
