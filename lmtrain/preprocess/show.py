"""The first documents of a config as the model will see them, for `lmtrain preprocess CONFIG --show N`:

    chats/train.jsonl:2: 23 tokens, 4 targets
    --- sequence 2
    <|im_start|>user
    Who counts the stars?<|im_end|>
    <|im_start|>assistant
    [[Nobody.<|im_end|>]]
    tokens: 384 '<|im_start|>', 301 'user', ...

Targets are in brackets, or coloured in a terminal. All tokens of text are targets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from lmtrain.data.config import DataConfig
from lmtrain.data.formats import Pack, PreferenceFormat, TextFormat, TooLong
from lmtrain.data.packing import kept_lengths, pack
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.documents import not_read
from lmtrain.preprocess.recipe import chat_template_of, check_special_tokens
from lmtrain.preprocess.record_reader import open_documents
from lmtrain.preprocess.records import AnswerPair, InstructionText
from lmtrain.preprocess.sources import AnySource, list_sources
from lmtrain.preprocess.token_sources import TokenSource, documents_in_place
from lmtrain.preprocess.tokenize import can_split, tokenize
from lmtrain.preprocess.write_shard import WARNINGS
from lmtrain.runtime.errors import counted

_GREEN, _BOLD, _PLAIN = "\x1b[32m", "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True, kw_only=True)
class ShownDocument:
    """A document: ids int [tokens]; which are targets, bool [tokens], None for text; numbers of the sequences that
    begin in it, by the index of their first token; its length before it was cut off at the end of a sequence; and what
    the build would warn of."""

    place: str
    ids: np.ndarray
    targets: np.ndarray | None
    sequences: dict[int, int]
    length: int
    notes: tuple[str, ...] = ()


def first_documents(config: DataConfig, seq_len: int, number: int) -> Iterator[ShownDocument]:
    """The first `number` documents of one source's training text, in sequences of `seq_len` tokens.

    Raises `UserError` as tokenizing does.
    """
    tokenizer = open_tokenizer(config.tokenizer, config.vocab_size)
    check_special_tokens(tokenizer, config)
    sequences, tokens = 0, 0
    for source in list_sources(config, "train", tokenizer):
        per_record = 2 if isinstance(config.format, PreferenceFormat) else 1
        documents = list(islice(_documents_of(source, config, tokenizer), per_record * number))
        number -= len(documents) // per_record
        if all(document.targets is None for document in documents):
            for document in documents:
                begins = range(-tokens % seq_len, document.length, seq_len)
                document.sequences.update({begin: (tokens + begin) // seq_len + 1 for begin in begins})
                tokens += document.length
        else:
            assert not isinstance(config.format, TextFormat)
            documents = _pack(documents, seq_len, config.format.too_long, config.pack, sequences, per_record)
            sequences += sum(len(document.sequences) for document in documents)
        yield from documents
        if not number:
            return


def _pack(
    documents: list[ShownDocument], seq_len: int, too_long: TooLong, how: Pack, before: int, per_record: int
) -> list[ShownDocument]:
    """The first documents of a shard in sequences, which are numbered from `before` + 1. Each shard is packed alone,
    and the first documents are packed as if there were all; by best fit they have no sequence, since the others matter.
    `per_record` is 2 for pairs of answers, else 1."""
    lengths = np.array([document.length for document in documents], np.int64).reshape(-1, per_record)
    packed = pack(lengths.sum(1), seq_len, too_long, how)
    first = packed.documents[packed.offsets[:-1]] if how == "first_fit" else packed.documents[:0]
    numbers = {per_record * record: before + 1 + index for index, record in enumerate(first.tolist())}
    kept = np.minimum(lengths, seq_len)
    if per_record == 2:
        kept = np.stack(kept_lengths(lengths[:, 0], lengths[:, 1], seq_len), axis=1)
    if too_long == "drop":
        kept[lengths.sum(1) > seq_len] = 0
    return [
        replace(
            document,
            ids=document.ids[:size],
            targets=None if document.targets is None else document.targets[:size],
            sequences={0: numbers[number]} if number in numbers else {},
        )
        for number, (document, size) in enumerate(zip(documents, kept.ravel().tolist(), strict=True))
    ]


def _documents_of(source: AnySource, config: DataConfig, tokenizer: Tokenizer) -> Iterator[ShownDocument]:
    if isinstance(source, TokenSource):
        for place, tokens in documents_in_place(source, config, tokenizer.vocab_size):
            ids, targets = tokens.ids, tokens.targets
            yield ShownDocument(place=place, ids=ids, targets=targets, sequences={}, length=len(ids))
        return
    reader = open_documents(source, config, tokenizer.vocab_size, chat_template_of(config))
    split_long = tokenizer.library is not None and can_split(tokenizer.library)
    left_out, noticed = 0, set[str]()
    for number, document in reader:
        batch = tokenize([document], tokenizer, config, split_long)
        notes = tuple(text.format("1 of 1 documents") for name, text in WARNINGS.items() if getattr(batch, name))
        if isinstance(document, InstructionText | AnswerPair) and document.repeats_prompt:
            notes += ("an answer of this document starts with its prompt, which is written twice and learned",)
        if new := [key for key in reader.passed_over if key not in noticed]:
            noticed.update(new)
            notes += (not_read(new, document),)
        if reader.left_out > left_out:
            notes += (f"{counted(reader.left_out - left_out, 'pair')} of equal answers before it are left out",)
            left_out = reader.left_out
        for index, end in enumerate(np.cumsum(batch.lengths).tolist()):
            part = slice(end - int(batch.lengths[index]), end)
            place = reader.place(number) + (f", {('chosen', 'rejected')[index]}" if len(batch.lengths) > 1 else "")
            targets = None if batch.targets is None else batch.targets[part]
            shown = notes if index == 0 else ()
            yield ShownDocument(
                place=place,
                ids=batch.tokens[part],
                targets=targets,
                sequences={},
                length=part.stop - part.start,
                notes=shown,
            )


def describe_document(document: ShownDocument, tokenizer: Tokenizer, colour: bool) -> str:
    """A document as text. `colour` marks targets by colour instead of brackets."""
    before, after = (_GREEN, _PLAIN) if colour else ("[[", "]]")
    head = f"{document.place}: {counted(document.length, 'token')}"
    targets = document.targets
    if targets is not None:
        head += f", {counted(int(targets.sum()), 'target')}"
    if len(document.ids) < document.length:
        what = f"cut off after {len(document.ids):,}" if len(document.ids) else "dropped"
        head += f", longer than model.seq_len: {what}"
    lines = [f"{_BOLD}{head}{_PLAIN}" if colour else head, *(f"warning: {note}" for note in document.notes)]
    if tokenizer.library is not None:
        lines += [_marked_text(document, tokenizer, before, after).removesuffix("\n")]
    if len(document.ids):
        lines.append("tokens: " + ", ".join(_tokens(document, tokenizer, before, after)))
    return "\n".join(lines)


def _marked_text(document: ShownDocument, tokenizer: Tokenizer, before: str, after: str) -> str:
    """The text of its tokens, with marks where sequences begin and around targets."""
    targets = np.zeros(len(document.ids), bool) if document.targets is None else document.targets
    borders = {0, len(document.ids), *document.sequences, *(np.flatnonzero(np.diff(targets)) + 1).tolist()}
    parts, written = [], ""
    for begin, end in zip(sorted(borders), sorted(borders)[1:], strict=False):
        if begin in document.sequences:
            parts.append(f"{'' if begin == 0 or written.endswith(chr(10)) else chr(10)}{_sequence(document, begin)}\n")
        # a decoder may write the first token of a text differently, so the text up to here is decoded
        text = tokenizer.backend.decode(document.ids[:end].tolist(), skip_special_tokens=False)
        piece = text[len(written) :]
        parts.append(f"{before}{piece}{after}" if targets[begin] else piece)
        written = text
    return "".join(parts)


def _tokens(document: ShownDocument, tokenizer: Tokenizer, before: str, after: str) -> Iterator[str]:
    for index, number in enumerate(document.ids.tolist()):
        text = str(number)
        if tokenizer.library is not None:
            text += f" {tokenizer.library.decode([number], skip_special_tokens=False)!r}"
        if document.targets is not None and document.targets[index]:
            text = f"{before}{text}{after}"
        yield f"{_sequence(document, index)}: {text}" if index and index in document.sequences else text


def _sequence(document: ShownDocument, begin: int) -> str:
    return f"--- sequence {document.sequences[begin]:,}"
