"""Documents -> token ids. Pure: the same documents and settings always give the same tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.long_documents import split_document


@dataclass(frozen=True)
class DocumentSettings:
    """What of the config changes the tokens of a document."""

    text_key: str
    enforce_eos: bool
    enforce_bos: bool
    on_bad_record: str = "error"


def check_special_tokens(tokenizer: Tokenizer, settings: DocumentSettings) -> None:
    """Raise `UserError` if a token to be enforced does not exist."""
    for name, wanted, number in (
        ("eos", settings.enforce_eos, tokenizer.eos_id),
        ("bos", settings.enforce_bos, tokenizer.bos_id),
    ):
        if wanted and number is None:
            raise UserError(
                f"tokenizer {tokenizer.path!r} has no {name}_token in tokenizer_config.json; "
                f"name one there, or set data.enforce_{name}: false"
            )


def token_dtype(vocab_size: int) -> np.dtype:
    """Two bytes a token where they suffice; little-endian everywhere, as it is what goes to disk."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def tokenize_batch(
    texts: list[str], tokenizer: Tokenizer, settings: DocumentSettings, split_long: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all texts one after the other, [tokens], and the length of each document, int64 [documents].

    Special tokens are added as ids, never as text, so that text that spells one stays text only if the tokenizer
    says so. `split_long` encodes long texts in pieces, for tokenizers that give the same tokens then.
    """
    pieces = [split_document(text) if split_long else [text] for text in texts]
    encodings = tokenizer.backend.encode_batch_fast(list(chain.from_iterable(pieces)), add_special_tokens=False)
    ids: Iterator[list[int]] = iter([encoding.ids for encoding in encodings])
    before = [tokenizer.bos_id] if settings.enforce_bos and tokenizer.bos_id is not None else []
    after = [tokenizer.eos_id] if settings.enforce_eos and tokenizer.eos_id is not None else []
    documents = [[before, *islice(ids, len(parts)), after] for parts in pieces]
    lengths = np.array([sum(map(len, parts)) for parts in documents], dtype=np.int64)
    flat = chain.from_iterable(chain.from_iterable(documents))
    tokens = np.fromiter(flat, dtype=token_dtype(tokenizer.vocab_size), count=int(lengths.sum()))
    return tokens, lengths
