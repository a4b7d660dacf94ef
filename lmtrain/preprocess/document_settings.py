"""What tokens depend on in addition to the text: document settings, special tokens, dtype of stored ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import Tokenizer


@dataclass(frozen=True)
class DocumentSettings:
    """Settings of the config that change the tokens of a document."""

    text_key: str
    enforce_eos: bool
    enforce_bos: bool
    on_bad_record: str = "error"
    text_documents: str = "line"
    format: Mapping[str, Any] | None = None  # of conversations and completions


def check_special_tokens(tokenizer: Tokenizer, settings: DocumentSettings) -> None:
    """Raise `UserError` if a token to be enforced does not exist. Completions always end in the EOS token."""
    kind = None if settings.format is None else settings.format["type"]
    if kind == "chat":
        return
    if kind == "completion" and tokenizer.eos_id is None:
        raise UserError(
            f"tokenizer {tokenizer.path!r} has no eos_token in tokenizer_config.json, which ends completions; set it "
            "there"
        )
    for name, wanted, number in (
        ("eos", settings.enforce_eos, tokenizer.eos_id),
        ("bos", settings.enforce_bos, tokenizer.bos_id),
    ):
        if wanted and number is None:
            advice = (
                f"{name}_token in tokenizer_config.json; set it there, or"
                if tokenizer.library
                else f"{name} token, since its documents are token ids;"
            )
            raise UserError(f"tokenizer {tokenizer.path!r} has no {advice} set data.enforce_{name}: false")


def token_dtype(vocab_size: int) -> np.dtype:
    """Dtype of stored token ids: two bytes if they suffice, else four; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")
