"""BPE and unigram models of sentencepiece as models of the `tokenizers` library.

`tokenizers` finds each entry of its vocabulary in the text. Sentencepiece does not find the names of reserved pieces,
such as `<s>` or `<0x0A>`, in a text that spells them. What prevents this depends on the characters of the name:

* One that occurs in no piece is isolated from the rest of the text, since the bytes that represent it are not affected,
  or, in a model without bytes, replaced by another such character, since all of them are equally unknown.
* Otherwise, a unigram model never prefers the name if its score is below that of its characters. In a BPE model,
  no merges lead to it; see `build_bpe` for the exception.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokenizers import models

from lmtrain.hf.patterns import literal

# Types of pieces in a sentencepiece model.
NORMAL, UNKNOWN, CONTROL, USER, UNUSED = 1, 2, 3, 4, 5

# Score of a user-defined symbol in a unigram model, for each byte except the first.
_BYTE_OF_SYMBOL = 0.1


@dataclass(frozen=True)
class Pieces:
    """Text, score and type of all pieces in the order of their ids; whether unknown characters become bytes."""

    all: tuple[tuple[str, float, int], ...]
    byte_fallback: bool

    def of(self, *kinds: int) -> list[str]:
        """Texts of the pieces of some types."""
        return [text for text, _, kind in self.all if kind in kinds]

    @functools.cached_property
    def symbols(self) -> frozenset[str]:
        """Symbols defined by the user."""
        return frozenset(self.of(USER))

    @functools.cached_property
    def names(self) -> list[str]:
        """Names of the pieces that no text is encoded as."""
        return [text for text, _, kind in self.all if kind not in (NORMAL, USER)]

    @functools.cached_property
    def single(self) -> set[str]:
        """Characters that are pieces."""
        return {text for text in self.of(NORMAL, USER) if len(text) == 1}

    @functools.cached_property
    def lacking(self) -> set[str]:
        """Characters of normal pieces that are no pieces themselves."""
        return {letter for text in self.of(NORMAL) for letter in text} - self.single

    def absent(self, names: Iterable[str]) -> set[str]:
        """Characters of the names that occur in no piece, except in symbols defined by the user."""
        return {letter for name in names for letter in name} - self.single - self.lacking

    @property
    def unknown_letter(self) -> str:
        """A character that occurs in no piece and no name."""
        used = {letter for text, _, _ in self.all for letter in text}
        return next(letter for letter in map(chr, range(0xE000, 0x110000)) if letter not in used)

    def outside_symbols(self, letter: str) -> str:
        """Pattern of a character except within symbols defined by the user."""
        within = [
            f"(?<={literal(text[:place])})" * (place > 0) + literal(text[place:])
            for text in sorted(self.symbols)
            for place in range(len(text))
            if text[place] == letter
        ]
        return f"(?!{'|'.join(within)}){literal(letter)}" if within else re.escape(letter)


def build_unigram(pieces: Pieces, unknown_id: int) -> tuple[models.Unigram, str, str]:
    """Unigram model, pattern of what is isolated in the text, pattern of what is replaced by an unknown character.

    Raises `ValueError` if `tokenizers` would encode some texts with other ids.
    """
    absent = pieces.absent(pieces.names)
    spelled = [name for name in pieces.names if not absent.intersection(name)]
    if pieces.byte_fallback:
        spelled += [name for name in pieces.names if name in absent]
    if (spelled and pieces.lacking) or any(len(name) == 1 for name in spelled):
        raise ValueError(f"a text could spell the reserved piece {spelled[0]!r}")
    scores = [score for _, score, kind in pieces.all if kind == NORMAL]
    # tokenizers derives the score of unknown characters from the lowest one: a lower one must not make a difference
    lowest = min(scores, default=0.0)
    never = lowest if pieces.lacking else (min(lowest, 0.0) - 1) * max(len(text) for text, _, _ in pieces.all)
    model = models.Unigram(
        [
            (text, score if kind == NORMAL else _BYTE_OF_SYMBOL * (len(text.encode()) - 1) if kind == USER else never)
            for text, score, kind in pieces.all
        ],
        unk_id=unknown_id,
        byte_fallback=pieces.byte_fallback,
    )
    pattern = "|".join(pieces.outside_symbols(letter) for letter in sorted(absent))
    return (model, pattern, "") if pieces.byte_fallback else (model, "", pattern)


def build_bpe(pieces: Pieces, isolate_symbols: bool) -> tuple[models.BPE, str, str]:
    """BPE model, pattern of what is isolated in the text, pattern of what is replaced by an unknown character.

    Sentencepiece stores no merges: any two pieces that form a third may merge, best scores first. Symbols defined by
    the user never merge. With `isolate_symbols`, the pattern isolates them, and what equals a piece is not merged, so
    what equals a name is isolated in two parts. Raises `ValueError` if `tokenizers` would encode some texts with other
    ids.
    """
    ids = {text: number for number, (text, _, _) in enumerate(pieces.all)}
    if unused := [text for text in pieces.of(UNUSED) if any(True for _ in _halves(text, ids))]:
        raise ValueError(f"its piece {unused[0]!r} is unused, but pieces that contain it are used")
    merges = [
        (-score, ids[left], ids[right], left, right)
        for text, score, kind in pieces.all
        if kind in (NORMAL, USER)
        for left, right in _halves(text, ids)
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]

    def build(ignore_merges: bool) -> models.BPE:
        return models.BPE(
            ids,
            pairs,
            unk_token=next(iter(pieces.of(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=pieces.byte_fallback,
            ignore_merges=ignore_merges,
        )

    if not isolate_symbols or not pieces.symbols:
        return build(False), "", ""
    symbols = [re.escape(symbol) for symbol in sorted(pieces.symbols, key=lambda text: (-len(text), text))]
    names = [name for name in pieces.names if len(name) > 1]
    absent = sorted(pieces.absent(names))
    kept = {*absent, *pieces.symbols}
    spelled = [text for text in [*names, *pieces.of(NORMAL)] if not any(part in text for part in kept)]
    cuts = _cuts(spelled, build(False))
    if pieces.byte_fallback:
        return build(True), "|".join(_isolated([*symbols, *map(re.escape, absent)], cuts)), ""
    return build(True), "|".join(_isolated(symbols, cuts)), "|".join(map(pieces.outside_symbols, absent))


def _halves(text: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """All pairs of pieces that form the text."""
    for cut in range(1, len(text)):
        if text[:cut] in ids and text[cut:] in ids:
            yield text[:cut], text[cut:]


def _cuts(texts: Iterable[str], model: models.BPE) -> list[tuple[str, str]]:
    """Two parts of each text that has several tokens; the parts have the same tokens. Raises `ValueError` if none."""
    tokens = {text: [token.value for token in model.tokenize(text)] for text in texts}
    several = {text: values for text, values in tokens.items() if values != [text]}
    cuts = []
    for text, values in several.items():
        parts = [("".join(values[:place]), "".join(values[place:])) for place in range(1, len(values))]
        safe = [pair for pair in parts if "".join(pair) == text and not several.keys() & set(pair)]
        if not safe:
            raise ValueError(f"a text could spell the piece {text!r}")
        cuts.append(safe[0])
    return cuts


def _isolated(patterns: list[str], cuts: Iterable[tuple[str, str]]) -> list[str]:
    """The patterns, and one of the first part of a text between two that match: at the end of the last match."""
    end = "|".join([r"\z", *patterns])
    ways = "|".join(f"{re.escape(first)}(?={re.escape(rest)}(?:{end}))" for first, rest in cuts)
    return [*patterns, rf"\G(?:{ways})"] if ways else patterns
