"""Number of text bytes of tokens, used to convert a loss per token into a loss per byte."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.hf.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Texts of one byte to find out whether a tokenizer adds a space; a small vocabulary may lack some of them.
_PROBES = "xeatoinsEA01"


@dataclass(frozen=True)
class TextSizes:
    """Bytes of each token's text, and those that it has as the first token of a text, after any of the tokens `after`:
    without the space that the tokenizer adds there. `first` is None if it adds none."""

    sizes: list[int]
    first: list[int] | None = None
    after: tuple[int, ...] = ()


def text_sizes(tokenizer: Tokenizer) -> TextSizes | None:
    """Sizes of a tokenizer's tokens: those of a document add up to its text, as the tokenizer normalizes it.

    A space at the start of a document is not counted if the tokenizer then adds none: its tokens are the same without.
    Returns None as `token_bytes` does.
    """
    sizes = token_bytes(tokenizer)
    if sizes is None:
        return None

    def size(text: str) -> int:
        try:
            with tokenizer.errors():
                ids = tokenizer.parsing_backend.encode(text, add_special_tokens=False).ids
        except UserError:  # a vocabulary without this letter
            return 0
        return sum(sizes[number] for number in ids)

    known = next((letter for letter in _PROBES if size(letter)), None)
    if known is None or size(known) != 2:
        return TextSizes(sizes)
    special = [token for token in tokenizer.parsing_backend.get_added_tokens_decoder().items() if token[1].special]
    after = {number for number in (tokenizer.eos_id, tokenizer.bos_id) if number is not None}
    if special and size(special[0][1].content + known) == size(known):  # not only at the start of a text
        after |= {number for number, _ in special}
    return TextSizes(sizes, [max(0, size - 1) for size in sizes], tuple(sorted(after)))


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
