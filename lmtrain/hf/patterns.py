"""Regular expressions for the `tokenizers` library, which uses Oniguruma."""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Set as AbstractSet


def literal(text: str) -> str:
    """Pattern of the text."""
    return "".join(rf"\x{{{ord(letter):X}}}" for letter in text)


def letter_class(letters: Iterable[str]) -> str:
    """Pattern of one of the letters."""
    ranges: list[list[int]] = []
    for code in sorted(map(ord, set(letters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "[" + "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in ranges) + "]"


def longest(strings: AbstractSet[str]) -> str:
    """Pattern of the longest of the `strings` at a position; empty if there are none."""
    return _longest(frozenset(strings), {})


def _longest(strings: frozenset[str], known: dict[frozenset[str], str]) -> str:
    """The letters that the same strings can follow share a class. `known` are the patterns built so far."""
    if strings not in known:
        following = defaultdict(set)
        for string in strings - {""}:
            following[string[0]].add(string[1:])
        letters = defaultdict(list)
        for letter, rest in following.items():
            letters[frozenset(rest)].append(letter)
        ways = sorted((min(first), letter_class(first) + _longest(rest, known)) for rest, first in letters.items())
        pattern = f"(?>{'|'.join(way for _, way in ways)})" if ways else ""
        known[strings] = f"{pattern}?" if ways and "" in strings else pattern
    return known[strings]
