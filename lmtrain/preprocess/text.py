"""Extraction and validation of documents from records of any format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lmtrain.config.errors import UserError


@dataclass(frozen=True)
class Instruction:
    """A conversation or a completion as text. `targets` are the parts that the model learns to write, as [start, end)
    in characters; `contents` are the texts that it was made of, without those of the template."""

    text: str
    targets: tuple[tuple[int, int], ...]
    contents: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.text)


# A document's text, its token ids with the passthrough tokenizer, or a document with targets.
Text = str | list[int] | Instruction

# A record's number and document. A bad record has an error as its value; the reader decides whether to raise it.
Record = tuple[int, Text | UserError]


class InstructionReader(Protocol):
    """Reads records that are conversations or completions."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a record that are read."""

    def read(self, record: Mapping[str, Any], place: str) -> Instruction | UserError:
        """The document of a record; error messages start with `place`."""


@dataclass(frozen=True)
class Field:
    """Location of the document in a record: text under `key`, or with `vocab_size` a list of token ids below it.

    In plain text a document is a `line`, a block between blank lines (`blank_line`), or the entire `file`. With
    `instructions` records are conversations or completions.
    """

    key: str
    vocab_size: int | None = None
    text_documents: str = "line"
    instructions: InstructionReader | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys of a record that are read; the first one must exist."""
        return (self.key,) if self.instructions is None else self.instructions.columns

    def read(self, document: Any, place: str) -> Text | UserError:
        """Extract the document of a record; error messages start with `place`."""
        if not isinstance(document, dict):
            return UserError(f"{place}: expected a JSON object with the key {self.columns[0]!r}")
        if self.instructions is not None:
            return _encodable(self.instructions.read(document, place), place)
        if self.key not in document:
            keys = ", ".join(map(repr, list(document)[:8])) or "none"
            return UserError(f"{place}: no key {self.key!r} (it has {keys}); set data.text_key to the key")
        value = document[self.key]
        if self.vocab_size is not None:
            return self._check_ids(value, self.vocab_size, place)
        if not isinstance(value, str):
            return UserError(f"{place}: {self.key!r} is {type(value).__name__}, not text")
        return _encodable(value, place)

    def read_json(self, content: bytes, place: str) -> Text | UserError:
        """Extract the document of a JSON record."""
        try:
            return self.read(json.loads(content), place)
        except UnicodeDecodeError as error:
            return UserError(f"{place}: not UTF-8: {error.reason} at byte {error.start}")
        except (ValueError, RecursionError) as error:
            return UserError(f"{place}: not JSON: {error}")

    def _check_ids(self, value: Any, vocab_size: int, place: str) -> list[int] | UserError:
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            return UserError(
                f"{place}: {self.key!r} is not a list of token ids, which the passthrough tokenizer requires"
            )
        wrong = next((number for number in value if not 0 <= number < vocab_size), None)
        if wrong is not None:
            return UserError(f"{place}: token id {wrong} is not below data.vocab_size {vocab_size}")
        return value


def _encodable(value: str | Instruction | UserError, place: str) -> str | Instruction | UserError:
    """The document, or an error if it is no Unicode text."""
    text = value.text if isinstance(value, Instruction) else value
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            return UserError(f"{place}: not UTF-8: {error.reason} at character {error.start}")
    return value
