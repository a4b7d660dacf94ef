"""Readers of text file formats: each is a function from an open file to numbered records.

    .jsonl    one JSON object per line, numbered by line; blank lines are skipped
    .json     the same, or one JSON document: an object, or an array of objects, numbered from 1
    .txt      one document per line, without its line break, numbered by line; blank lines are skipped. Depending on
              `data.text_documents`: a block between blank lines, or the entire file, numbered by its first line
    .parquet  one document per row, numbered from 1

A record that cannot be read yields an error instead of its text, and reading continues after it.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import IO, Any

from lmtrain.config.errors import UserError
from lmtrain.preprocess.text import Field, Record

_CHUNK_BYTES = 1 << 20
_PARQUET_ROWS = 256


def read_jsonl(file: Iterable[bytes], field: Field, name: str) -> Iterator[Record]:
    """One document for each line of JSON, with the number of its line."""
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, field.read_json(line, f"{name}:{number}")


def read_txt(file: Iterable[bytes], field: Field, name: str) -> Iterator[Record]:
    """Documents of plain text, divided by `data.text_documents`, with the number of their first line."""
    if field.vocab_size is not None:
        raise UserError(f"{name}: a .txt holds text, but the passthrough tokenizer requires token ids")
    if field.instructions is not None:
        raise UserError(f"{name}: a .txt holds text without fields; use .jsonl, or remove data.format")
    if field.text_documents == "line":
        yield from (record for record in _txt_lines(file, name) if not _is_blank(record[1]))
        return
    first = 0
    lines: list[str] = []
    for number, line in _txt_lines(file, name):
        if isinstance(line, UserError):
            yield number, line
        elif not _is_blank(line) or (lines and field.text_documents == "file"):
            first = number if not lines else first
            lines.append(line)
        elif lines:
            yield first, "\n".join(lines)
            lines = []
    if lines:
        yield first, "\n".join(lines)


def _txt_lines(file: Iterable[bytes], name: str) -> Iterator[tuple[int, str | UserError]]:
    """Every line without its break and without a byte order mark."""
    for number, line in enumerate(file, start=1):
        try:
            yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield number, UserError(f"{name}:{number}: not UTF-8: {error.reason} at byte {error.start}")


def _is_blank(line: str | UserError) -> bool:
    return isinstance(line, str) and not line.strip()


def read_json(file: IO[Any], field: Field, name: str) -> Iterator[Record]:
    """Documents of a .json file. An array is read in chunks, so that its size does not matter."""
    first = next((line for line in file if line.strip()), b"")
    if first.lstrip().startswith(b"["):
        for number, document in enumerate(_array_items(first, file, name), start=1):
            yield number, field.read(document, f"{name}:{number}")
        return
    try:
        json.loads(first or b"{}")
    except ValueError:  # one object over several lines
        yield 1, field.read_json(first + file.read(), name)
    else:
        yield from read_jsonl(chain([first], file), field, name)


def read_parquet(file: IO[Any], field: Field, name: str) -> Iterator[Record]:
    """One document for each row, with the number of its row."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(file)
        present = table.schema_arrow.names
        columns = [column for column in field.columns if column in present]
        if field.columns[0] not in columns:
            names, setting = ", ".join(map(repr, present[:8])), "text_key" if field.instructions is None else "format"
            raise UserError(
                f"{name}: no column {field.columns[0]!r} (it has {names}); set data.{setting} to the column"
            )
        batches = table.iter_batches(batch_size=_PARQUET_ROWS, columns=columns)
        rows = chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, row in enumerate(rows, start=1):
            yield number, field.read(row, f"{name}:{number}")
    except pyarrow.ArrowException as error:
        raise UserError(f"{name}: corrupt, or not Parquet: {error}") from None


READERS: dict[str, Callable[[IO[Any], Field, str], Iterator[Record]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".txt": read_txt,
    ".parquet": read_parquet,
}


def _array_items(first: bytes, file: IO[Any], name: str) -> Iterator[Any]:
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
                raise UserError(f"{name}:{number + 1}: not UTF-8: {error.reason}") from None
            text += pending[: error.start].decode()
            pending = pending[error.start :]
        while True:
            text = text.lstrip(" \t\r\n").removeprefix(",").lstrip(" \t\r\n") if number else text.lstrip(" \t\r\n")
            if text.startswith("]"):
                return
            try:
                item, end = decoder.raw_decode(text)
            except ValueError as error:
                if ended:
                    raise UserError(f"{name}:{number + 1}: not JSON: {error}") from None
                break
            if end == len(text) and not ended:
                break  # a number may continue in the next chunk
            number += 1
            text = text[end:]
            yield item
        chunk = file.read(_CHUNK_BYTES)
        ended = not chunk
        pending += chunk
