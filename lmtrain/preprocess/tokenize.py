"""Tokenization of documents. Pure: the same documents and settings always give the same tokens."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.document_settings import DocumentSettings, token_dtype
from lmtrain.preprocess.long_documents import split_document

# Characters to encode in one call; encodings take 100 times the memory of their text.
_GROUP_CHARACTERS = 2_000_000


def tokenize_batch(
    texts: list[Any], tokenizer: Tokenizer, settings: DocumentSettings, split_long: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenated token ids of all documents, [tokens], and the length of each, int64 [documents].

    The documents are texts, or lists of ids for the tokenizer passthrough.

    Special tokens are added as ids, never as text, so the tokenizer alone decides about text that spells one.
    `split_long` encodes long texts in pieces, for tokenizers whose tokens do not change by it.
    """
    before = tokenizer.bos_id if settings.enforce_bos else None
    after = tokenizer.eos_id if settings.enforce_eos else None
    dtype = token_dtype(tokenizer.vocab_size)
    if not texts:
        return np.zeros(0, dtype), np.zeros(0, np.int64)
    if tokenizer.library is None:
        lengths = np.array([len(ids) for ids in texts], np.int64)
        ids = np.fromiter(chain.from_iterable(texts), dtype, count=int(lengths.sum()))
        return _with_ends(ids, lengths, before, after)
    pieces = [split_document(text) if split_long else [text] for text in texts]
    parts, counts = zip(*_encode(tokenizer, list(chain.from_iterable(pieces)), dtype), strict=True)
    first_piece = np.cumsum([0, *map(len, pieces[:-1])])
    lengths = np.add.reduceat(np.concatenate(counts), first_piece)
    return _with_ends(np.concatenate(parts), lengths, before, after)


def _encode(tokenizer: Tokenizer, pieces: list[str], dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens, and the number of tokens in each piece, in groups of pieces of limited size to limit memory."""
    group: list[str] = []
    characters = 0
    for number, piece in enumerate(pieces, start=1):
        group.append(piece)
        characters += len(piece)
        if characters >= _GROUP_CHARACTERS or number == len(pieces):
            encodings = tokenizer.backend.encode_batch_fast(group, add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
            counts = np.array([len(part) for part in ids], np.int64)
            yield np.fromiter(chain.from_iterable(ids), dtype, count=int(counts.sum())), counts
            group, characters = [], 0


def _with_ends(
    tokens: np.ndarray, lengths: np.ndarray, before: int | None, after: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Add the ids `before` and `after` to each document; returns the tokens and the new lengths."""
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
    return out, extended
