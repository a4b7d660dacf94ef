"""The n-grams of benchmark items, to be found in training texts."""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from lmtrain.preprocess.word_hashes import Words, ngrams, words_of

if TYPE_CHECKING:
    from lmtrain.evaluation.benchmarks.items import BenchmarkItem

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


@dataclass(frozen=True)
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
        return BenchmarkIndex(about["size"], saved["hashes"], saved["owners"], table, names, about["short"])


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
    return BenchmarkIndex(size, every, owner, table, [(item.task, item.number) for item in items], short)
