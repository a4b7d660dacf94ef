"""Number of text bytes of each token, used to convert a loss per token into a loss per byte."""

import json
import re
from collections.abc import Callable
from typing import Any

from lmtrain.hf.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_bytes(tokenizer: Tokenizer) -> list[int] | None:
    """Length in bytes of each token's text; 0 for special tokens and unused ids.

    Two spellings of tokens are supported: byte-level BPE has one letter per byte, and sentencepiece has text with a
    sign for the space and names for bytes. Returns None for other kinds of tokenizers, whose tokens have no text of
    fixed length, and for passthrough.
    """
    if tokenizer.library is None:
        return None
    content = json.loads(tokenizer.library.to_str())
    decoder = json.dumps(content.get("decoder"), ensure_ascii=False)
    size: Callable[[str], int]
    if '"ByteLevel"' in decoder:
        size = len
    elif any(part in decoder for part in ('"ByteFallback"', '"Metaspace"', "▁")):
        size = _sentencepiece_bytes
    else:
        return None
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    unknown = _unknown_id(content["model"], tokenizer.library)
    lengths = [0] * tokenizer.vocab_size
    for text, number in tokenizer.library.get_vocab(with_added_tokens=True).items():
        if number in added:
            lengths[number] = 0 if added[number]["special"] else len(text.encode())
        elif number != unknown:
            lengths[number] = size(text)
    return lengths


def _sentencepiece_bytes(piece: str) -> int:
    return 1 if _BYTE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def _unknown_id(model: Any, library: Any) -> int | None:
    """Id of the unknown token, whose text length is undefined."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    return None if model.get("unk_token") is None else library.token_to_id(model["unk_token"])
