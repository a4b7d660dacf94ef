"""The documents of files of token ids that are read in place, one after the other."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lmtrain.data.caches import Cache, open_store
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TooLong
from lmtrain.data.shards import Shards
from lmtrain.preprocess.recipe import token_dtype
from lmtrain.preprocess.records import TokenizedText
from lmtrain.preprocess.token_sources import TokenSource

# Tokens that are read at once.
_READ_TOKENS = 1 << 16


class PlacedDocument(NamedTuple):
    """A document, and its file with the number of its first token."""

    place: str
    tokens: TokenizedText


def documents_in_place(source: TokenSource, config: DataConfig, vocab_size: int) -> Iterator[PlacedDocument]:
    """The documents of a file, as its layout divides it. Raises `UserError` if its index is corrupt."""
    source.check_index()
    shards, dtype = Shards.of_one(source.info), token_dtype(vocab_size).str
    too_long: TooLong | None = None if source.info.targets is None else "cut"
    store = open_store(config, Cache(config.cache_dir, {}, [], dtype, shards, too_long))

    def document(ids: np.ndarray, targets: np.ndarray) -> PlacedDocument:
        tokens = TokenizedText(ids, None if too_long is None else targets)
        return PlacedDocument(f"{source.label}, token {begin:,}", tokens)

    begin, ids, targets = 0, np.zeros(0, np.int32), np.zeros(0, bool)
    for start in range(0, source.info.tokens, _READ_TOKENS):
        read = store.read(np.array([start]), min(_READ_TOKENS, source.info.tokens - start))
        more, begins, are_targets = (part[0] for part in read)
        ids, targets = np.append(ids, more), np.append(targets, are_targets)
        for border in [start + at for at in np.flatnonzero(begins).tolist() if start + at > begin]:
            size = border - begin
            yield document(ids[:size], targets[:size])
            ids, targets, begin = ids[size:], targets[size:], border
    if len(ids):
        yield document(ids, targets)
