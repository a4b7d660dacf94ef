"""What the searches for benchmark items and for duplicates compare: hashes of the words of texts.

A word is a run of letters, digits and underscores in lower case; all else only separates words. Hashes are polynomials
modulo 2^64 in an odd number, whose powers have inverses, so that the hash of any part is a difference of two sums.
"""

import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from lmtrain.data.mixture import mix

if TYPE_CHECKING:
    from lmtrain.evaluation.benchmarks.tasks import BenchmarkItem


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


# An n-gram that more items of a task share is one of its wording, and says nothing about an item.
_MOST_ITEMS = 10
# Slots of the table that most words of a text are compared with first, for each n-gram.
_SLOTS = 16
_MOST_SLOTS = 1 << 27


class Hit(NamedTuple):
    """Words of a text that are words of an item: the numbers of the first and the last word, inclusive."""

    item: int
    text: int
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class BenchmarkIndex:
    """N-grams of items. `hashes` uint64 [n], ascending, with the item of each, `owners` int32 [n].

    `names`: task and number of each item. `short`: the number of items of each task that have fewer than `size` words,
    and cannot be found.
    """

    size: int
    hashes: np.ndarray
    owners: np.ndarray
    table: np.ndarray
    names: list[tuple[str, int]]
    short: dict[str, int]

    @property
    def digest(self) -> str:
        """Equal for indexes that find the same."""
        return hashlib.sha256(self.hashes.tobytes() + bytes([self.size])).hexdigest()[:16]

    def find(self, words: Words) -> list[Hit]:
        """Where the texts have n-grams of items; n-grams of an item that overlap or touch are one hit."""
        found, firsts = ngrams(words, self.size)
        likely = self.table[(found % np.uint64(len(self.table))).astype(np.int64)]
        found, firsts = found[likely], firsts[likely]
        begin, end = (np.searchsorted(self.hashes, found, side=side) for side in ("left", "right"))
        spans: dict[tuple[int, int], list[Hit]] = {}
        for place in np.flatnonzero(end > begin).tolist():
            first, text = int(firsts[place]), int(words.texts[firsts[place]])
            for item in self.owners[begin[place] : end[place]].tolist():
                hits = spans.setdefault((text, item), [])
                if hits and first <= hits[-1].last + 1:
                    hits[-1] = hits[-1]._replace(last=first + self.size - 1)
                else:
                    hits.append(Hit(item, text, first, first + self.size - 1))
        return sorted((hit for hits in spans.values() for hit in hits), key=lambda hit: (hit.text, hit.first, hit.item))


def save_index(index: BenchmarkIndex) -> bytes:
    """The index as the content of a file."""
    file = io.BytesIO()
    about = json.dumps({"size": index.size, "names": index.names, "short": index.short})
    np.savez(file, hashes=index.hashes, owners=index.owners, table=np.packbits(index.table), about=np.array(about))
    return file.getvalue()


def load_index(file: IO[bytes]) -> BenchmarkIndex:
    """The index that `save_index` saved."""
    with np.load(file) as saved:
        about = json.loads(str(saved["about"]))
        names = [(task, number) for task, number in about["names"]]
        table = np.unpackbits(saved["table"]).astype(bool)
        return BenchmarkIndex(
            size=about["size"],
            hashes=saved["hashes"],
            owners=saved["owners"],
            table=table,
            names=names,
            short=about["short"],
        )


def build_index(items: Sequence["BenchmarkItem"], size: int) -> BenchmarkIndex:
    """The index of the n-grams of `size` words of items."""
    hashes, owners, short = [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)], dict.fromkeys([i.task for i in items], 0)
    for number, item in enumerate(items):
        own = np.unique(ngrams(words_of(item.texts), size)[0])
        short[item.task] += not len(own)
        hashes.append(own)
        owners.append(np.full(len(own), number, np.int32))
    every, owner = np.concatenate(hashes), np.concatenate(owners)
    order = np.argsort(every, kind="stable")
    every, owner = every[order], owner[order]
    _, inverse, counts = np.unique(every, return_inverse=True, return_counts=True)
    rare = counts[inverse] <= _MOST_ITEMS
    every, owner = every[rare], owner[rare]
    table = np.zeros(min(_MOST_SLOTS, 1 << max(10, (_SLOTS * len(every)).bit_length())), bool)
    table[(every % np.uint64(len(table))).astype(np.int64)] = True
    return BenchmarkIndex(
        size=size,
        hashes=every,
        owners=owner,
        table=table,
        names=[(item.task, item.number) for item in items],
        short=short,
    )


# Bytes of hashes and places that are in memory at once.
_MEMORY = 1 << 30


class DocumentHashes:
    """Hashes of the documents of many sources, in files of `folder`: memory does not grow with their number."""

    def __init__(self, folder: str):
        self._folder = folder
        self._sizes: dict[int, int] = {}

    def add(self, number: int, hashes: np.ndarray) -> None:
        """Add the documents of source `number`, uint64; documents of hash 0 are no duplicates."""
        self._sizes[number] = len(hashes)
        np.save(self._path(number), hashes)

    def find(self, sources: Sequence[int]) -> tuple[dict[int, np.ndarray], Counter[tuple[int, int]]]:
        """The documents that occurred before, in the order of `sources`, by source: bool [documents].

        Also the number of them by source and by the source of the first occurrence.
        """
        repeated = {number: np.zeros(self._sizes[number], bool) for number in sources}
        starts = np.cumsum([0, *(self._sizes[number] for number in sources)])
        counts: Counter[tuple[int, int]] = Counter()
        parts = max(1, -(-16 * int(starts[-1]) // _MEMORY))
        for part in range(parts):
            hashes, places = self._part(sources, starts, part, parts)
            order = np.argsort(hashes, kind="stable")
            hashes, places = hashes[order], places[order]
            is_first = np.concatenate([[True], hashes[1:] != hashes[:-1]])[: len(hashes)]
            firsts = places[is_first][np.cumsum(is_first) - 1]
            again, first = places[~is_first], firsts[~is_first]
            owner, of_first = (np.searchsorted(starts, which, side="right") - 1 for which in (again, first))
            for index, number in enumerate(sources):
                repeated[number][again[owner == index] - starts[index]] = True
            pairs, times = np.unique(np.stack([owner, of_first], axis=1), axis=0, return_counts=True)
            for (mine, theirs), count in zip(pairs.tolist(), times.tolist(), strict=True):
                counts[sources[mine], sources[theirs]] += count
        return repeated, counts

    def _part(self, sources: Sequence[int], starts: np.ndarray, part: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """The hashes of one part of their values, and the number of each document among all."""
        hashes, places = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for index, number in enumerate(sources):
            values = np.load(self._path(number), mmap_mode="r" if self._sizes[number] else None)
            mine = np.flatnonzero((values != 0) & (values % np.uint64(parts) == part))
            hashes.append(np.asarray(values[mine]))
            places.append(mine + starts[index])
        return np.concatenate(hashes), np.concatenate(places)

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"{number}.npy")
