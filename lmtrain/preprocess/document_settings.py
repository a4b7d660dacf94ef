"""What tokens depend on in addition to the text: document settings, special tokens, dtype of stored ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import ChatFormat, CompletionFormat
from lmtrain.hf.chat_template import ChatTemplate, find_template
from lmtrain.hf.find_tokenizer import PASSTHROUGH, find_tokenizer
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


def document_settings(config: DataConfig) -> DocumentSettings:
    """Settings of the config that change the tokens of a document."""
    kind = config.format
    described: dict[str, Any] | None = None
    if isinstance(kind, ChatFormat):
        template = chat_template_of(config)
        assert template is not None
        described = kind.model_dump(include={"type", "messages_field", "loss_on", "chat_template_kwargs"})
        described |= {"template": template.digest}
    elif isinstance(kind, CompletionFormat):
        described = kind.model_dump(exclude={"too_long"})
    return DocumentSettings(
        config.text_key, config.enforce_eos, config.enforce_bos, config.on_bad_record, config.text_documents, described
    )


def chat_template_of(config: DataConfig) -> ChatTemplate | None:
    """The template of conversations; None for other data. Raises `UserError` if there is none."""
    if not isinstance(config.format, ChatFormat):
        return None
    if config.tokenizer == PASSTHROUGH:
        raise UserError("data.format: conversations are texts, but the tokenizer is passthrough")
    return find_template(find_tokenizer(config.tokenizer), config.format.chat_template, "data.format.chat_template")


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
