"""Tokenization of documents. Pure: the same documents and settings always give the same tokens. Long documents are
split for it.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat, TokensFormat
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.recipe import token_dtype
from lmtrain.preprocess.records import AnswerPair, InstructionText, TokenizedText

if TYPE_CHECKING:
    import tokenizers


# Splitting of documents too long for one call of the tokenizer, which uses 100 times their size in memory.
#
# Documents are split where the tokens do not change: before a single space between two words. GPT-2's pre-tokenizer,
# which most byte-level tokenizers use, always starts a new piece there, and merges never cross pieces. Other tokenizers
# may depend on text across the split, so their documents are not split.

# Long enough to be fast, short enough for the memory of a worker (about 200 MB).
_PIECE_CHARACTERS = 1_000_000
_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")


def can_split(backend: "tokenizers.Tokenizer") -> bool:
    """Whether a split between words provably does not change the tokens."""
    content = json.loads(backend.to_str())
    before = content["pre_tokenizer"] or {}
    return (
        content["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and (before.get("use_regex", True) or not content["model"].get("merges"))
        and not before.get("add_prefix_space", True)
        and not any(_looks_around(token) for token in content["added_tokens"])
    )


def _looks_around(added: dict[str, object]) -> bool:
    spaces = any(letter.isspace() for letter in str(added["content"]))
    return spaces or any(added.get(flag) for flag in ("lstrip", "rstrip", "single_word", "normalized"))


def split_document(text: str, piece: int = _PIECE_CHARACTERS) -> list[str]:
    """Split a text between words into pieces of at least `piece` characters, except for the last."""
    pieces = []
    start = 0
    while len(text) - start > piece:
        cut = _BETWEEN_WORDS.search(text, start + piece)
        if cut is None:
            break
        pieces.append(text[start : cut.start()])
        start = cut.start()
    return [*pieces, text[start:]]


# What templates write after a reply.
_ENDS_OF_TURNS = ("</s>", "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|end_of_text|>")
# Characters to encode in one call; encodings take 100 times the memory of their text.
_GROUP_CHARACTERS = 2_000_000


class TokenBatch(NamedTuple):
    """Concatenated token ids of documents, [tokens], and the length of each, int64 [documents]. Of instructions also
    which tokens are targets, bool [tokens], and the numbers of documents whose contents spell a special token, without
    targets, with something that the template does not write, with reasoning that it does not write, with something of
    the assistant outside of its marks, and without a special token among their targets. `empty`: texts without a
    token. `doubled`: documents whose text has the EOS or BOS token that is added to it. `foreign`: documents with a
    content that ends with the end of a turn of another tokenizer. `listed`: completions that are lists of texts in
    JSON."""

    tokens: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray | None = None
    spelled: int = 0
    without_targets: int = 0
    unwritten: int = 0
    unreasoned: int = 0
    unmarked: int = 0
    endless: int = 0
    empty: int = 0
    doubled: int = 0
    foreign: int = 0
    listed: int = 0

    def only(self, kept: np.ndarray) -> "TokenBatch":
        """The documents of `kept`, bool [documents]. The other counts stay those of all documents."""
        if kept.all():
            return self
        of_kept = np.repeat(kept, self.lengths)
        targets = None if self.targets is None else self.targets[of_kept]
        return self._replace(tokens=self.tokens[of_kept], lengths=self.lengths[kept], targets=targets)


def tokenize(documents: list[Any], tokenizer: Tokenizer, config: DataConfig, split_long: bool = False) -> TokenBatch:
    """Encode documents of one kind: instructions, texts, ids, or lists of ids with the tokenizer passthrough.

    Special tokens are added to texts as ids, never as text, so the tokenizer alone decides about text that spells one.
    `split_long` encodes long texts in pieces, for tokenizers whose tokens do not change by it.
    """
    if isinstance(config.format, TokensFormat):
        return _concatenate(documents, tokenizer)
    if not isinstance(config.format, TextFormat):
        return _tokenize_instructions(documents, tokenizer, config)
    before = tokenizer.bos_id if config.enforce_bos else None
    after = tokenizer.eos_id if config.enforce_eos else None
    dtype = token_dtype(tokenizer.vocab_size)
    if not documents:
        return TokenBatch(np.zeros(0, dtype), np.zeros(0, np.int64))
    if tokenizer.library is None:
        lengths = np.array([len(ids) for ids in documents], np.int64)
        ids = np.fromiter(chain.from_iterable(documents), dtype, count=int(lengths.sum()))
        return _with_ends(ids, lengths, before, after)
    pieces = [split_document(text) if split_long else [text] for text in documents]
    parts, counts = zip(*_encode(tokenizer, list(chain.from_iterable(pieces)), dtype), strict=True)
    first_piece = np.cumsum([0, *map(len, pieces[:-1])])
    lengths = np.add.reduceat(np.concatenate(counts), first_piece)
    tokens = np.concatenate(parts)
    spelled, doubled = _count_spelled(tokens, lengths, list(tokenizer.special_tokens), before, after)
    empty = int((lengths == 0).sum())
    return _with_ends(tokens, lengths, before, after)._replace(spelled=spelled, doubled=doubled, empty=empty)


def _concatenate(documents: list[TokenizedText], tokenizer: Tokenizer) -> TokenBatch:
    dtype = token_dtype(tokenizer.vocab_size)
    ids = np.concatenate([np.zeros(0, dtype), *(document.ids.astype(dtype) for document in documents)])
    lengths = np.array([len(document) for document in documents], np.int64)
    targets = [document.targets for document in documents if document.targets is not None]
    if not targets:
        return TokenBatch(ids, lengths)
    without = sum(not part.any() for part in targets)
    return TokenBatch(ids, lengths, np.concatenate(targets), without_targets=without)


def _encode(tokenizer: Tokenizer, pieces: list[str], dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens, and the number of tokens in each piece, in groups of pieces of limited size to limit memory."""
    group: list[str] = []
    characters = 0
    for number, piece in enumerate(pieces, start=1):
        group.append(piece)
        characters += len(piece)
        if characters >= _GROUP_CHARACTERS or number == len(pieces):
            with tokenizer.errors():
                encodings = tokenizer.backend.encode_batch_fast(group, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
            counts = np.array([len(part) for part in ids], np.int64)
            yield np.fromiter(chain.from_iterable(ids), dtype, count=int(counts.sum())), counts
            group, characters = [], 0


def _count_spelled(
    tokens: np.ndarray, lengths: np.ndarray, special: list[int], before: int | None, after: int | None
) -> tuple[int, int]:
    """Numbers of documents with `special` tokens, and of those that start with `before` or end with `after`."""
    ends = np.cumsum(lengths)
    seen = np.concatenate([[0], np.cumsum(np.isin(tokens, special))])
    spelled = np.flatnonzero(seen[ends] > seen[ends - lengths])
    starts, last = tokens[(ends - lengths)[spelled]], tokens[ends[spelled] - 1]
    twice = np.zeros(len(spelled), bool)
    twice |= False if before is None else starts == before
    twice |= False if after is None else last == after
    return len(spelled), int(twice.sum())


def _with_ends(tokens: np.ndarray, lengths: np.ndarray, before: int | None, after: int | None) -> TokenBatch:
    extended = lengths + (before is not None) + (after is not None)
    ends = np.cumsum(extended)
    out = np.empty(int(ends[-1]), tokens.dtype)
    text = np.ones(len(out), bool)
    if before is not None:
        out[ends - extended] = before
        text[ends - extended] = False
    if after is not None:
        out[ends - 1] = after
        text[ends - 1] = False
    out[text] = tokens
    return TokenBatch(out, extended)


def _tokenize_instructions(
    records: list[InstructionText | AnswerPair], tokenizer: Tokenizer, config: DataConfig
) -> TokenBatch:
    """Encode instructions with their special tokens, which the text spells.

    A token is a target if any of its characters is. Completions get an EOS token, a target, and a BOS token if it is
    enforced; conversations have what their template writes. A pair of answers becomes two documents, whose targets
    start where one of them differs from the tokens of their prompt alone, as in TRL.
    """
    documents: list[InstructionText] = []
    for record in records:
        documents += [record.chosen, record.rejected] if isinstance(record, AnswerPair) else [record]
    with tokenizer.errors():
        encodings = tokenizer.parsing_backend.encode_batch([text.text for text in documents], add_special_tokens=False)
        starts = _answer_starts(records, encodings, tokenizer)
    ids, targets, doubled = [], [], 0
    for number, (document, encoding) in enumerate(zip(documents, encodings, strict=True)):
        # TRL does not repeat an EOS token that an answer spells
        ends = document.is_plain and not (starts and encoding.ids[-1:] == [tokenizer.eos_id])
        before = [tokenizer.bos_id] if document.is_plain and config.enforce_bos else []
        after = [tokenizer.eos_id] if ends else []
        ids.append(np.array([*before, *encoding.ids, *after], token_dtype(tokenizer.vocab_size)))
        if starts:
            inside = np.arange(len(encoding.ids)) >= starts[number]
        else:
            inside = _overlaps(np.array(encoding.offsets, np.int64).reshape(-1, 2), document.targets)
        doubled += (bool(after) and encoding.ids[-1:] == after) or (bool(before) and encoding.ids[:1] == before)
        targets.append(np.concatenate([np.zeros(len(before), bool), inside, np.ones(len(after), bool)]))
    special = tokenizer.special_tokens.values()
    foreign = tuple(token for token in _ENDS_OF_TURNS if tokenizer.parsing_backend.token_to_id(token) is None)
    final = {tokenizer.eos_id, *tokenizer.special_tokens}
    return TokenBatch(
        tokens=np.concatenate(ids),
        lengths=np.array([len(part) for part in ids], np.int64),
        targets=np.concatenate(targets),
        spelled=sum(any(token in text for token in special for text in document.contents) for document in documents),
        without_targets=sum(not part.any() for part in targets),
        unwritten=sum(not document.is_written for document in documents),
        unreasoned=sum(not document.has_reasoning for document in documents),
        unmarked=sum(not document.is_marked for document in documents),
        endless=sum(
            bool(not document.is_plain and part.any() and not final.intersection(own[part].tolist()))
            for document, own, part in zip(documents, ids, targets, strict=True)
        ),
        doubled=doubled,
        listed=sum(text.is_plain and text.contents[-1].lstrip().startswith('["') for text in documents),
        foreign=sum(any(text.rstrip().endswith(foreign) for text in document.contents) for document in documents),
    )


def _answer_starts(
    records: list[InstructionText | AnswerPair], encodings: list[Any], tokenizer: Tokenizer
) -> list[int]:
    """The number of the first token of each answer; empty for documents that are no answers."""
    prompts = [record.prompt for record in records if isinstance(record, AnswerPair)]
    starts = []
    for number, alone in enumerate(tokenizer.parsing_backend.encode_batch(prompts, add_special_tokens=False)):
        pair = encodings[2 * number : 2 * number + 2]
        starts += 2 * [min(_common_length(alone.ids, answer.ids) for answer in pair)]
    return starts


def _common_length(first: list[int], second: list[int]) -> int:
    """Number of equal ids at the start of both."""
    different = (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(different, min(len(first), len(second)))


def _overlaps(offsets: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Which of the character ranges `offsets` [tokens, 2] overlap any of the ascending, disjoint `spans`; bool."""
    if not spans:
        return np.zeros(len(offsets), bool)
    starts, ends = np.array(spans, np.int64).T
    first = np.searchsorted(ends, offsets[:, 0], side="right")  # the first span that ends after the token's start
    start = starts[np.minimum(first, len(starts) - 1)]
    return np.asarray((first < len(starts)) & (start < offsets[:, 1]))
