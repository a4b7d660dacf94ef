"""Documents of records: where they are in a record of any file format, and what is wrong with a damaged one."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


class BadRecordError(Exception):
    """What is wrong with a record, without its place."""


class EqualAnswersError(Exception):
    """Two answers are equal, so that no preference can be learned from them."""


@dataclass(frozen=True, kw_only=True)
class InstructionText:
    """A conversation or a completion as text. `targets` are the parts that the model learns to write, as [start, end)
    in characters; `contents` are the texts that it was made of, without those of the template.

    `is_written`: the text has all that the messages say or call, and the tools. `is_marked`: what the template marks as
    the assistant's has all that it says or calls. `has_reasoning`: the text has all that the assistant thinks.
    `is_plain`: no template has written it, so that it gets an EOS token. `repeats_prompt`: the answer starts with the
    prompt, perhaps since both stand under its key. `passed_over`: keys of messages whose texts the text does not have.
    """

    text: str
    targets: tuple[tuple[int, int], ...]
    contents: tuple[str, ...]
    is_written: bool = True
    is_marked: bool = True
    has_reasoning: bool = True
    is_plain: bool = False
    repeats_prompt: bool = False
    passed_over: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to a prompt, each as a text that starts with the prompt. They become two documents."""

    chosen: InstructionText
    rejected: InstructionText

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def prompt(self) -> str:
        return self.chosen.text[: self.chosen.targets[0][0]]

    @property
    def passed_over(self) -> tuple[str, ...]:
        return self.chosen.passed_over + self.rejected.passed_over

    @property
    def repeats_prompt(self) -> bool:
        return self.chosen.repeats_prompt or self.rejected.repeats_prompt


@dataclass(frozen=True)
class TokenizedText:
    """A document as token ids, and which of them are targets, bool; None: all."""

    ids: np.ndarray
    targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


# A document's text, its token ids with the passthrough tokenizer, one or two with targets, or one that is tokenized.
Document = str | list[int] | InstructionText | AnswerPair | TokenizedText

# A record's number and content. A record that cannot be parsed has an error as its content.
Record = tuple[int, Any]

# Keys by which records of conversations and of completions are recognized where a text is expected.
_CHAT_SHAPES = ({"messages"}, {"conversations"}, {"instruction", "output"})
COMPLETION = {"prompt", "completion"}
PREFERENCE = {"chosen", "rejected"}
# Keys of instructions, which may stand next to a text that was made of them.
_INSTRUCTIONS = {"messages", "conversations", "completion", "chosen", "rejected"}
READ_CHATS = "data.format: {type: chat} to read conversations"
READ_COMPLETIONS = "data.format: {type: completion} to read prompts with completions"
READ_PREFERENCES = "data.format: {type: preference} to read pairs of answers"


# Keys that say what the tokens of a row are: labels, padding, and 1 for targets: of Megatron and others, of TRL's
# completions, of chat templates in transformers.
TOKEN_MARKS = ("labels", "attention_mask", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask")


class RecordReader(Protocol):
    """Reads the documents of records."""

    @property
    def key(self) -> str:
        """The key that every record has."""

    def reads(self, key: str) -> bool:
        """Whether this key of a record is read."""

    def passes_over(self, key: str, value: Any = None) -> bool:
        """Whether to warn that this key of a record is not read. `value` is None if it is not known."""

    def check_keys(self, keys: Collection[str]) -> None:
        """Raise `BadRecordError`, which names the setting to change, if records with these keys lack a document."""

    def read(self, record: Mapping[str, Any]) -> Document:
        """The document of a record. Raises `BadRecordError`."""


@dataclass(frozen=True)
class Texts:
    """Reads texts under `key`. In plain text a document is a `line`, a block between blank lines (`blank_line`), or the
    entire `file`. `advise` says what to change for records with these keys, which have no text."""

    key: str
    text_documents: str = "line"
    advise: Callable[[Collection[str]], str] = lambda keys: f"set {_setting_for(keys)}"

    def reads(self, key: str) -> bool:
        return key == self.key

    def passes_over(self, key: str, value: Any = None) -> bool:
        return key in _INSTRUCTIONS and key != self.key

    def check_keys(self, keys: Collection[str]) -> None:
        if self.key not in keys:
            raise BadRecordError(f"no key {self.key!r} (it has {listed_keys(keys)}); {self.advise(keys)}")

    def read(self, record: Mapping[str, Any]) -> Document:
        self.check_keys(record)
        return checked_text(record[self.key], self.key)


@dataclass(frozen=True, kw_only=True)
class TokenIds(Texts):
    """Reads lists of token ids below `vocab_size` under `key`."""

    vocab_size: int = 0

    def check_keys(self, keys: Collection[str]) -> None:
        super().check_keys(keys)
        if marks := [key for key in TOKEN_MARKS if key in keys and key != self.key]:
            raise BadRecordError(
                f"{marks[0]!r} is not read; set data.format: {{type: tokens, input_ids_field: {self.key}}} and remove "
                "data.text_key to read it"
            )

    def read(self, record: Mapping[str, Any]) -> Document:
        self.check_keys(record)
        ids = record[self.key]
        if not isinstance(ids, list) or not all(type(number) is int for number in ids):
            raise BadRecordError(f"{self.key!r} is not a list of token ids, which the passthrough tokenizer requires")
        wrong = next((number for number in ids if not 0 <= number < self.vocab_size), None)
        if wrong is not None:
            raise BadRecordError(f"token id {wrong} is not below data.vocab_size {self.vocab_size}")
        return ids


def read_document(reader: RecordReader, record: Any) -> Document:
    """The document of a parsed record. Raises `BadRecordError` for a damaged one."""
    if isinstance(record, BadRecordError):
        raise record
    if not isinstance(record, dict):
        raise BadRecordError(no_object(reader))
    try:
        document = reader.read(record)
    except RecursionError:
        raise BadRecordError("nested too deeply") from None
    for text in texts_of(document):
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
                raise BadRecordError(f"not UTF-8: {error.reason} at character {error.start}") from None
    return document


def row_of_table(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the nulls that Arrow adds to its maps: it gives each of them the keys of those in other rows."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list) and value and not isinstance(value[0], int | float | str):
        return list(map(_without_nulls, value))
    return value


def is_held_out(document: Document, fraction: float) -> bool:
    """Whether a document is one of the `fraction` that is held out for validation, by a hash of its text, of its ids,
    or of the prompt of a pair of answers: equal ones are on the same side, in any file."""
    texts = [document.prompt] if isinstance(document, AnswerPair) and document.prompt else texts_of(document)
    ids = document.ids if isinstance(document, TokenizedText) else document
    content = "\n".join(texts).encode() if texts else np.asarray(ids, "<i8").tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def texts_of(document: Document) -> list[str]:
    """The texts of a document; none of token ids."""
    if isinstance(document, AnswerPair):
        return [document.chosen.text, document.rejected.text]
    if isinstance(document, InstructionText):
        return [document.text]
    return [document] if isinstance(document, str) else []


def checked_text(value: Any, key: str) -> str:
    """The value if it is a text. Raises `BadRecordError` if not."""
    if not isinstance(value, str):
        raise BadRecordError(f"{key!r} is {type(value).__name__}, not text")
    return value


def no_object(reader: RecordReader) -> str:
    """Message for a record that is no map."""
    return f"expected a JSON object with the key {reader.key!r}"


def listed_keys(keys: Collection[str]) -> str:
    """The first keys of a record, for messages."""
    return ", ".join(map(repr, list(keys)[:8])) or "none"


def is_conversation(keys: Collection[str]) -> bool:
    """Whether a record with these keys is a conversation."""
    return any(shape <= set(keys) for shape in _CHAT_SHAPES)


def _setting_for(keys: Collection[str]) -> str:
    """The setting by which records with these keys can be read that have no text."""
    if set(keys) >= PREFERENCE:
        return READ_PREFERENCES
    if is_conversation(keys):
        return READ_CHATS
    if set(keys) >= COMPLETION:
        return READ_COMPLETIONS
    return "data.text_key to the key"
