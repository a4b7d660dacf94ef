"""Tokenization of conversations and completions: token ids, and which of them are targets."""

from typing import NamedTuple

import numpy as np

from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.document_settings import DocumentSettings, token_dtype
from lmtrain.preprocess.text import Instruction


class InstructionTokens(NamedTuple):
    """Concatenated token ids of all documents [tokens]; the length of each, int64 [documents]; which tokens are
    targets, bool [tokens]; the numbers of documents whose contents spell a special token, and without targets."""

    tokens: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    spelled: int
    without_targets: int


def tokenize_instructions(
    documents: list[Instruction], tokenizer: Tokenizer, settings: DocumentSettings
) -> InstructionTokens:
    """Encode documents with their special tokens, which the text spells.

    A token is a target if any of its characters is. Completions get an EOS token, a target, and a BOS token if it is
    enforced; conversations have what their template writes.
    """
    assert settings.format is not None
    completes = settings.format["type"] == "completion"
    before = [tokenizer.bos_id] if completes and settings.enforce_bos else []
    after = [tokenizer.eos_id] if completes else []
    encodings = tokenizer.parsing_backend.encode_batch([one.text for one in documents], add_special_tokens=False)
    ids, targets = [], []
    for document, encoding in zip(documents, encodings, strict=True):
        ids.append(np.array([*before, *encoding.ids, *after], token_dtype(tokenizer.vocab_size)))
        inside = _overlaps(np.array(encoding.offsets, np.int64).reshape(-1, 2), document.targets)
        targets.append(np.concatenate([np.zeros(len(before), bool), inside, np.ones(len(after), bool)]))
    special = [
        token.content for token in tokenizer.parsing_backend.get_added_tokens_decoder().values() if token.special
    ]
    return InstructionTokens(
        np.concatenate(ids),
        np.array([len(part) for part in ids], np.int64),
        np.concatenate(targets),
        sum(any(token in content for token in special for content in one.contents) for one in documents),
        sum(not part.any() for part in targets),
    )


def _overlaps(offsets: np.ndarray, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Which of the character ranges `offsets` [tokens, 2] overlap any of the ascending, disjoint `spans`; bool."""
    if not spans:
        return np.zeros(len(offsets), bool)
    starts, ends = np.array(spans, np.int64).T
    first = np.searchsorted(ends, offsets[:, 0], side="right")  # the first span that ends after the token's start
    found = starts[np.minimum(first, len(starts) - 1)]
    return np.asarray((first < len(starts)) & (found < offsets[:, 1]))
