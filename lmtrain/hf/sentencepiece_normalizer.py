"""Normalization of a sentencepiece model in terms of the `tokenizers` library.

Sentencepiece reads a text from left to right: the longest user-defined symbol at a position is kept, otherwise the
longest sequence that has a rule is replaced. `Precompiled` of `tokenizers` has the same rules but applies them to
grapheme clusters, and loses characters: of `½` and a joiner only the replacement of `½` remains. Therefore

1. a separator is inserted after each unit that sentencepiece reads, if the next character could combine with it;
2. a second kind of separator is inserted within the units, so that `Precompiled` replaces single characters;
3. without the second separators, `NFC` composes the characters of each unit, and then the first ones are removed.

Some rules replace a sequence by something else than the composition of its characters; they are applied after step 1.
What the later steps would change, such as some user-defined symbols, is replaced by a code, and the code by its text
at the end. Separators and codes end with a control character that has no rule; in the text it is escaped.
"""

import functools
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, normalizers

# Those of sentencepiece have 500,000 prefixes of at most 16 bytes; a file could have a cycle.
_MAX_PREFIXES, _MAX_BYTES = 5_000_000, 1000


def read_rules(charsmap: bytes) -> dict[str, str]:
    """Replacement of each sequence of characters that a `precompiled_charsmap` replaces.

    The format: a 32-bit length, a trie of that many bytes, and the replacements, each of which ends with a zero byte.
    The trie is a double array of darts-clone: 32-bit units, where the child with label `c` of a node with offset `o` is
    stored at position `o ^ c`, and its value at position `o`. Raises `ValueError` for other content.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if not 4 <= size <= len(charsmap) - 4 or size % 4:
        raise ValueError("not a normalization of sentencepiece")
    units = np.frombuffer(charsmap[4 : 4 + size], "<u4").astype(np.int64)
    replacements = charsmap[4 + size :]
    positions = np.arange(len(units))
    labels = np.where(units >> 31, 0, units & 0xFF)  # the first bit marks values
    offsets = (positions ^ ((units >> 10) << ((units & 512) >> 6))).tolist()
    children = defaultdict(list)  # of a node, by its offset
    for node, label in zip(np.flatnonzero(labels).tolist(), labels[labels > 0].tolist(), strict=True):
        children[node ^ label].append((node, bytes([label])))
    rules = {}
    prefixes = [(0, b"")]  # nodes with the bytes that lead to them
    visited = 0
    while prefixes:
        node, prefix = prefixes.pop()
        visited += 1
        if visited > _MAX_PREFIXES or len(prefix) > _MAX_BYTES:
            raise ValueError("not a normalization of sentencepiece: too many or too long rules")
        if units[node] >> 8 & 1:  # it ends here
            if offsets[node] >= len(units):
                raise ValueError("not a normalization of sentencepiece: its trie is corrupt")
            start = int(units[offsets[node]]) & 0x7FFFFFFF
            rules[prefix.decode()] = replacements[start : replacements.index(b"\0", start)].decode()
        prefixes += [(child, prefix + label) for child, label in children[offsets[node]]]
    return rules


def literal(text: str) -> str:
    """Pattern of the text."""
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in text)


def letter_class(letters: Iterable[str]) -> str:
    """Pattern of one of the letters."""
    codes = sorted(map(ord, set(letters)))
    firsts = [code for code, before in zip(codes, [None, *codes], strict=False) if before != code - 1]
    lasts = [code for code, after in zip(codes, [*codes[1:], None], strict=False) if after != code + 1]
    return "[" + "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in zip(firsts, lasts, strict=True)) + "]"


def longest(strings: AbstractSet[str]) -> str:
    """Pattern of the longest of the `strings` at a position; empty if there are none. The letters that the same strings
    can follow share a class."""

    @functools.cache
    def of(strings: frozenset[str]) -> str:
        following = defaultdict(set)
        for string in strings - {""}:
            following[string[0]].add(string[1:])
        letters = defaultdict(list)
        for letter, rest in following.items():
            letters[frozenset(rest)].append(letter)
        ways = sorted((min(first), letter_class(first) + of(rest)) for rest, first in letters.items())
        pattern = f"(?>{'|'.join(way for _, way in ways)})" if ways else ""
        return f"{pattern}?" if ways and "" in strings else pattern

    return of(frozenset(strings))


SPACE = "▁"

_END = "\x80"
_ESCAPED, _BETWEEN_UNITS, _WITHIN_UNIT, _SUFFIX, _CODE = (letter + _END for letter in "\x81\x82\x83\x84\x85")

# Characters that combine with the previous one in a grapheme cluster or a composition: marks, what is not yet assigned
# in the tables of the regular expressions, and some others.
_COMBINING = (
    r"\p{M}\p{Cn}\x{0E33}\x{0EB3}\x{1160}-\x{11FF}\x{200C}\x{200D}\x{D7B0}-\x{D7FB}\x{FF9E}\x{FF9F}"
    r"\x{16D63}-\x{16D6A}\x{1F3FB}-\x{1F3FF}\x{E0020}-\x{E007F}"
)
# Each takes one or two passes over a text. The standard rules need 50, and the symbols of the user may need some.
_MAX_REPLACED = 500


def build_normalizers(spec: Any, suffix: bool, symbols: frozenset[str]) -> list[normalizers.Normalizer]:
    """Normalizers, to be applied in order, for a model's `normalizer_spec` and its user-defined `symbols`.

    With `suffix`, the space that the model adds to each text is added to the end. Raises `ValueError` with the reason
    if the `tokenizers` library cannot represent the normalization.
    """
    squeeze, added = spec.remove_extra_whitespaces, spec.add_dummy_prefix
    prefix, suffix = added and not suffix, added and suffix
    if not spec.escape_whitespaces:
        raise ValueError("its pieces have spaces (escape_whitespaces is false)")
    if squeeze and any(" " in symbol for symbol in symbols):
        raise ValueError("it removes extra spaces, but not those of its user-defined symbols")
    none = _Rules(apply=[], restore=[], codes={}, spaces=" ")
    rules = _read(spec.precompiled_charsmap, symbols) if spec.precompiled_charsmap else none
    if squeeze and any(" " in text for text in rules.codes):
        raise ValueError("it removes extra spaces, but one of its rules inserts them")
    is_escaped = bool(rules.apply) or suffix
    add_prefix = [normalizers.Prepend(" ")] if prefix else []
    steps: list[normalizers.Normalizer] = []
    if not squeeze:  # first, since it is added even if no other character remains
        steps += add_prefix
    if is_escaped:
        steps.append(normalizers.Replace(_END, _ESCAPED))
    if suffix:  # to each text, or to each that is not removed as spaces
        spaces = letter_class(rules.spaces)
        other = "|".join([*filter(None, [longest(symbols)]), rf"(?!{spaces})[\s\S]"])
        steps.append(_replace(rf"(?:{other}){spaces}*\K\z" if squeeze else r"[\s\S]\K\z", _SUFFIX))
    steps += rules.apply
    if squeeze:
        steps += [_replace(r"\A +", ""), _replace(" {2,}", " ")]
    steps += rules.restore
    if squeeze:
        steps.append(_replace(rf"[ {SPACE}]+(?={_SUFFIX}\z)" if suffix else rf"[ {SPACE}]+\z", ""))
    if suffix:
        steps.append(normalizers.Replace(_SUFFIX, " "))
    if is_escaped:
        steps.append(normalizers.Replace(_ESCAPED, _END))
    return [*steps, *(add_prefix if squeeze else []), normalizers.Replace(" ", SPACE)]


def _replace(pattern: str, content: str) -> normalizers.Normalizer:
    return normalizers.Replace(Regex(pattern), content)


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """Normalizers of a model's rules: `apply`, for an escaped text, and `restore`, which replaces their `codes` by
    text. `spaces` are the characters that become a space."""

    apply: Sequence[normalizers.Normalizer]
    restore: Sequence[normalizers.Normalizer]
    codes: dict[str, str]
    spaces: str


@functools.lru_cache(8)
def _read(charsmap: bytes, symbols: frozenset[str]) -> _Rules:
    """Read the rules, and verify those that are not just the composition of several characters.

    Raises `ValueError` if one has another result.
    """
    table = read_rules(charsmap)
    later = {letter for unit in table for letter in unit[1:]}  # that may belong to the previous character
    singles = {unit: text for unit, text in table.items() if len(unit) == 1}
    later |= {unit for unit, text in singles.items() if text and text[0] in later}
    combining = f"[{_COMBINING}{letter_class(later).removeprefix('[')}"
    composes = len({text for unit, text in table.items() if len(unit) > 1}) > _MAX_REPLACED
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000 and chr(code) != _END]
    changed = {letter for letter, text in zip(every, _compose(every), strict=True) if letter != text} - table.keys()
    kept = symbols | (changed if composes else set())
    sequences = longest(table.keys() - singles.keys())
    units = [  # after which a separator is needed
        longest(kept),
        rf"(?=[\s\S]{combining}){sequences}" if sequences else "",
        rf"[\s\S](?={combining})",
        r"\r(?=\n)",
    ]
    start = rf"(?:(?<![^{_END}])|(?!{combining}))"  # of a unit

    def build(replaced: Mapping[str, AbstractSet[str]], codes: Mapping[str, str]) -> _Rules:
        """With `replaced` units by text, which the other steps would replace by something else."""
        apply = [
            _replace(rf"(?>{'|'.join(filter(None, units))})\K", _BETWEEN_UNITS),
            *(_replace(f"{start}{longest(of)}(?={_BETWEEN_UNITS})", codes.get(to, to)) for to, of in replaced.items()),
            _replace(rf"[^{_END}]\K(?={combining})", _WITHIN_UNIT),
            normalizers.Precompiled(charsmap),
            normalizers.Replace(_WITHIN_UNIT, ""),
            *([normalizers.NFC()] if composes else []),
            normalizers.Replace(_BETWEEN_UNITS, ""),
        ]
        spaces = " " + "".join(unit for unit, text in singles.items() if text == " ")
        restore = [normalizers.Replace(code, text) for text, code in codes.items()]
        return _Rules(apply=apply, restore=restore, codes=dict(codes), spaces=spaces)

    wanted = table | {unit: unit for unit in kept}
    if any(_END in text for pair in wanted.items() for text in pair):
        raise ValueError(f"it has a rule or symbol for the control character {_END!r}")
    found = ["".join(table.get(letter, letter) for letter in unit) for unit in wanted]
    units_of = defaultdict(set)
    for (unit, text), now in zip(wanted.items(), _compose(found) if composes else found, strict=True):
        if now != text:
            units_of[text].add(unit)
    if len(units_of) > _MAX_REPLACED:
        raise ValueError(f"it has {len(units_of)} unusual rules of normalization")
    # the longest first; codes for those that the other steps would change
    replaced = {text: units_of[text] for text in sorted(units_of, key=lambda to: (-max(map(len, units_of[to])), to))}
    changed = set(_differences(build({}, {}), {text: text for text in replaced}))
    without_combining = _replace(rf"\A{combining}", "")
    changed |= {text for text in replaced if without_combining.normalize_str(text) != text}
    codes = {text: f"{_CODE}{number}{_CODE}" for number, text in enumerate(replaced) if text in changed}
    rules = build(replaced, codes)
    letters = {letter for text, of in replaced.items() for part in (text, *of) for letter in part}
    verified = {unit: text for unit, text in wanted.items() if len(unit) == 1 or letters.intersection(unit)}
    for unit in _differences(rules, verified):
        raise ValueError(f"its normalization replaces {unit!r} by {wanted[unit]!r}")
    return rules


def _compose(texts: Iterable[str]) -> list[str]:
    """Composition of each text. The texts do not contain the last control character."""
    return normalizers.NFC().normalize_str(_END.join(texts)).split(_END)


def _differences(rules: _Rules, wanted: Mapping[str, str]) -> list[str]:
    """The keys that are not replaced by their values."""
    used = {letter for pair in wanted.items() for text in pair for letter in text}
    between = next(letter for letter in map(chr, range(0xE000, 0x110000)) if letter not in used)
    normalized = normalizers.Sequence([*rules.apply, *rules.restore]).normalize_str(between.join(wanted))
    return [unit for unit, text in zip(wanted, normalized.split(between), strict=True) if wanted[unit] != text]
