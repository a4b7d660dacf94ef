"""Documents -> token ids. Pure: the same documents and settings always give the same tokens."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.document_settings import DocumentSettings, token_dtype
from lmtrain.preprocess.long_documents import split_document

# Encodings take a hundred times the memory of their text.
_GROUP_CHARACTERS = 2_000_000


def tokenize_batch(
    texts: list[Any], tokenizer: Tokenizer, settings: DocumentSettings, split_long: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all documents one after the other, [tokens], and the length of each, int64 [documents].

    The documents are texts, or lists of ids for the tokenizer passthrough.

    Special tokens are added as ids, never as text, so that text that spells one stays text only if the tokenizer
    says so. `split_long` encodes long texts in pieces, for tokenizers that give the same tokens then.
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
    """Tokens and the number of them in each piece, for as many pieces at a time as memory should hold encodings of."""
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
    """Documents of these lengths with an id put before and after each."""
    whole = lengths + (before is not None) + (after is not None)
    ends = np.cumsum(whole)
    out = np.empty(int(ends[-1]), tokens.dtype)
    text = np.ones(len(out), bool)
    if before is not None:
        out[ends - whole] = before
        text[ends - whole] = False
    if after is not None:
        out[ends - 1] = after
        text[ends - 1] = False
    out[text] = tokens
    return out, whole
