"""What tokens depend on beside the text: settings of documents, special tokens, the type that ids are kept in."""

from dataclasses import dataclass

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import Tokenizer


@dataclass(frozen=True)
class DocumentSettings:
    """What of the config changes the tokens of a document."""

    text_key: str
    enforce_eos: bool
    enforce_bos: bool
    on_bad_record: str = "error"
    text_documents: str = "line"


def check_special_tokens(tokenizer: Tokenizer, settings: DocumentSettings) -> None:
    """Raise `UserError` if a token to be enforced does not exist."""
    for name, wanted, number in (
        ("eos", settings.enforce_eos, tokenizer.eos_id),
        ("bos", settings.enforce_bos, tokenizer.bos_id),
    ):
        if wanted and number is None:
            advice = (
                f"{name}_token in tokenizer_config.json; name one there, or"
                if tokenizer.library
                else f"{name} token, as it takes token ids as they are;"
            )
            raise UserError(f"tokenizer {tokenizer.path!r} has no {advice} set data.enforce_{name}: false")


def token_dtype(vocab_size: int) -> np.dtype:
    """Two bytes a token where they suffice; little-endian everywhere, as it is what goes to disk."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")
