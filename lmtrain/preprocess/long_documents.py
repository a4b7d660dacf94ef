"""Splitting of documents too long for one call of the tokenizer, which uses 100 times their size in memory.

Documents are split where the tokens do not change: before a single space between two words. GPT-2's pre-tokenizer,
which most byte-level tokenizers use, always starts a new piece there, and merges never cross pieces. Other tokenizers
may depend on text across the split, so their documents are not split.
"""

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

# Long enough to be fast, short enough for the memory of a worker (about 200 MB).
_PIECE_CHARACTERS = 1_000_000
_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")


def can_split(backend: "tokenizers.Tokenizer") -> bool:
    """Whether a split between words provably does not change the tokens."""
    content = json.loads(backend.to_str())
    before = content["pre_tokenizer"] or {}
    return (
        content["normalizer"] is None
        and before.get("type") == "ByteLevel"
        and (before.get("use_regex", True) or not content["model"].get("merges"))
        and not before.get("add_prefix_space", True)
        and not any(_looks_around(token) for token in content["added_tokens"])
    )


def _looks_around(added: dict[str, object]) -> bool:
    spaces = any(letter.isspace() for letter in str(added["content"]))
    return spaces or any(added.get(flag) for flag in ("lstrip", "rstrip", "single_word", "normalized"))


def split_document(text: str, piece: int = _PIECE_CHARACTERS) -> list[str]:
    """Split a text between words into pieces of at least `piece` characters, except for the last."""
    pieces = []
    start = 0
    while len(text) - start > piece:
        cut = _BETWEEN_WORDS.search(text, start + piece)
        if cut is None:
            break
        pieces.append(text[start : cut.start()])
        start = cut.start()
    return [*pieces, text[start:]]
