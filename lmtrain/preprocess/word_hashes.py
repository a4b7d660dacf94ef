"""Hashes of the words of texts: what the searches for benchmark items and for duplicates compare.

A word is a run of letters, digits and underscores in lower case; all else only separates words. Hashes are polynomials
modulo 2^64 in an odd number, whose powers have inverses, so that the hash of any part is a difference of two sums.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmtrain.data.permutation import mix

# Not letters of a word, in texts with other than ASCII letters; in ASCII, `_IN_WORD` decides.
_OTHER = re.compile(r"[^\w]+")
_IN_WORD = np.zeros(256, bool)
_IN_WORD[[ord(letter) for letter in "abcdefghijklmnopqrstuvwxyz0123456789_"]] = True
_IN_WORD[128:] = True

_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 2**64)
# Letters whose hashes are computed at once.
_LETTERS = 1 << 20


class Words(NamedTuple):
    """The words of several texts, one after the other.

    `hashes`: uint64 [words]; `texts`: the text of each word, int64 [words]; `starts` and `ends`: its place in
    `content`, int64 [words]; `content`: the texts in lower case, each followed by a line break, as UTF-8; `begins`:
    where each text starts in it, int64 [texts].
    """

    hashes: np.ndarray
    texts: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    content: bytes
    begins: np.ndarray

    def between(self, first: int, last: int) -> str:
        """The text from the word `first` to the word `last`, inclusive."""
        return self.content[self.starts[first] : self.ends[last]].decode()

    def character(self, word: int) -> int:
        """Where a word starts in its text, in characters."""
        return len(self.content[self.begins[self.texts[word]] : self.starts[word]].decode())


def words_of(texts: Sequence[str]) -> Words:
    """The words of texts, with their hashes."""
    lowered = [text.lower() for text in texts]
    parts = [
        (text if text.isascii() else _OTHER.sub(lambda found: " " * len(found[0]), text)).encode("utf-8", "replace")
        for text in lowered
    ]
    content = b"\n".join([*parts, b""])
    letters = np.frombuffer(content, np.uint8)
    inside = np.concatenate([[False], _IN_WORD[letters], [False]])
    borders = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = borders[::2], borders[1::2]
    sizes = np.array([len(part) + 1 for part in parts], np.int64)
    begins = np.cumsum(sizes) - sizes
    owners = np.searchsorted(begins, starts, side="right") - 1
    hashes = np.empty(len(starts), np.uint64)
    first = 0
    while first < len(starts):  # in parts, since sums over letters take 40 bytes for each
        last = max(first + 1, int(np.searchsorted(ends, starts[first] + _LETTERS, side="right")))
        part = letters[starts[first] : ends[last - 1]].astype(np.uint64) + np.uint64(1)
        hashes[first:last] = _of_parts(part, starts[first:last] - starts[first], ends[first:last] - starts[first])
        first = last
    return Words(hashes, owners, starts, ends, content, begins)


def ngrams(words: Words, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each `size` consecutive words of one text, uint64 [n-grams], and the number of its first word."""
    count = len(words.hashes) - size + 1
    if count <= 0:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64)
    first = np.flatnonzero(words.texts[:count] == words.texts[size - 1 :])
    total = np.zeros(count, np.uint64)
    for place in range(size):
        total = total * np.uint64(_BASE) + words.hashes[place : place + count]
    return mix(total)[first], first


def text_hashes(words: Words, number: int) -> np.ndarray:
    """A hash of the words of each of the `number` texts, uint64 [texts]: equal for equal words, 0 without words."""
    owners = np.arange(number)
    starts = np.searchsorted(words.texts, owners, side="left")
    ends = np.searchsorted(words.texts, owners, side="right")
    return np.where(ends > starts, _of_parts(words.hashes, starts, ends), np.uint64(0))


def _of_parts(values: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The hash of values[start:end] for each part."""
    powers = _powers(_BASE, len(values))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers, dtype=np.uint64)])
    inverses = _powers(_INVERSE, len(values) + 1)
    with np.errstate(over="ignore"):
        return mix((sums[ends] - sums[starts]) * inverses[starts] + (ends - starts).astype(np.uint64))


def _powers(base: int, count: int) -> np.ndarray:
    """base^0, base^1, ..., modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return factors.cumprod(dtype=np.uint64)
