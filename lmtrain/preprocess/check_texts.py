"""Checks of the texts of a source: documents that have parts of benchmark items, and hashes to find duplicates."""

import functools
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lmtrain.data.config import DataConfig
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.executor import Report
from lmtrain.preprocess.record_reader import record_reader
from lmtrain.preprocess.records import Document, TokenizedText, texts_of
from lmtrain.preprocess.sources import AnySource
from lmtrain.preprocess.text_matches import BenchmarkIndex, load_index, text_hashes, words_of
from lmtrain.preprocess.token_sources import TokenSource, documents_in_place
from lmtrain.preprocess.tokenize import tokenize
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import read_bytes

# Characters that are checked at once.
_GROUP_CHARACTERS = 1_000_000
# Places that are listed for each source; all are counted.
_LISTED = 1000
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Words that a document shares with a benchmark item: the place of the document, where they start in it in
    characters, their number and their text."""

    document: str
    character: int
    task: str
    item: int
    words: int
    text: str


@dataclass(kw_only=True)
class CheckedSource:
    """What a check found in one source. `hashes`: of each document's words, uint64 [documents]; `contaminated`: which
    documents overlap an item, bool [documents]; by task, the numbers of these and the items that they overlap."""

    documents: int = 0
    hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    contaminated: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    by_task: Counter[str] = field(default_factory=Counter)
    items: dict[str, set[int]] = field(default_factory=dict)
    tokens: int = 0
    overlaps: list[Overlap] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CheckJob:
    """A check of one source, by the index of benchmarks at `index`, if any."""

    source: AnySource
    config: DataConfig
    index: str | None
    template: ChatTemplate | None = None

    def run(self, report: Report) -> CheckedSource:
        """Read the source and check its documents."""
        tokenizer = open_tokenizer(self.config.tokenizer, self.config.vocab_size)
        index = None if self.index is None else _index(self.index)
        found, hashes, contaminated = CheckedSource(), [np.zeros(0, np.uint64)], [np.zeros(0, bool)]
        for group, size in self._groups(tokenizer):
            words = words_of([text for _, text, _ in group])
            hashes.append(text_hashes(words, len(group)))
            own = np.zeros(len(group), bool)
            tasks: dict[int, set[str]] = {}
            hits = [] if index is None else [(hit, index.names[hit.item]) for hit in index.find(words)]
            for hit, (task, item) in hits:
                own[hit.text] = True
                tasks.setdefault(hit.text, set()).add(task)
                found.items.setdefault(task, set()).add(item)
                if len(found.overlaps) < _LISTED:
                    text = words.between(hit.first, hit.last)[:_SHOWN_CHARACTERS]
                    number = hit.last - hit.first + 1
                    place = group[hit.text][0]
                    found.overlaps.append(
                        Overlap(
                            document=place,
                            character=words.character(hit.first),
                            task=task,
                            item=item,
                            words=number,
                            text=text,
                        )
                    )
            for named in tasks.values():
                found.by_task.update(named)
            documents = [group[number][2] for number in np.flatnonzero(own).tolist()]
            found.tokens += _count_tokens(documents, tokenizer, self.config)
            contaminated.append(own)
            found.documents += len(group)
            report(len(group), 0, size)
        found.hashes, found.contaminated = np.concatenate(hashes), np.concatenate(contaminated)
        return found

    def counts(self, result: CheckedSource) -> tuple[int, int, int]:
        """Documents, no tokens, and bytes of input."""
        return result.documents, 0, self.source.bytes

    def check(self, result: CheckedSource) -> None:
        """The result is complete in itself."""

    def _groups(self, tokenizer: Tokenizer) -> Iterator[tuple[list[tuple[str, str, Document]], int]]:
        """Documents in groups, each with its place and text; and the bytes that were read for the group."""
        group: list[tuple[str, str, Document]] = []
        characters, position, before = 0, 0, 0
        for place, document, position in self._documents(tokenizer):
            text = _text(document, tokenizer)
            group.append((place, text, document))
            characters += len(text)
            if characters >= _GROUP_CHARACTERS:
                yield group, position - before
                group, characters, before = [], 0, position
        if group:
            yield group, position - before

    def _documents(self, tokenizer: Tokenizer) -> Iterator[tuple[str, Document, int]]:
        """Place and content of each document, and the bytes that were read up to its end."""
        if isinstance(self.source, TokenSource):
            width = self.source.bytes / max(self.source.info.tokens, 1)
            position = 0.0
            for placed in documents_in_place(self.source, self.config, tokenizer.vocab_size):
                position += width * len(placed.tokens)
                yield placed.place, placed.tokens, int(position)
            return
        reader = DocumentReader(
            self.source,
            record_reader(self.config, tokenizer.vocab_size, self.template),
            skip_bad=self.config.on_bad_record == "skip",
            max_document_bytes=self.config.max_document_bytes,
        )
        for number, document in reader:
            yield reader.place(number), document, reader.position


@functools.lru_cache(1)
def _index(path: str) -> BenchmarkIndex:
    return load_index(io.BytesIO(read_bytes(path)))


def _text(document: Document, tokenizer: Tokenizer) -> str:
    if texts := texts_of(document):
        return "\n".join(texts)
    if tokenizer.library is None:
        raise UserError(
            "a check needs texts, but the tokenizer passthrough has only token ids; set data.tokenizer to the one that "
            "they are of, with data.format: {type: tokens}"
        )
    ids = document.ids if isinstance(document, TokenizedText) else np.array(document)
    text: str = tokenizer.library.decode(ids.tolist(), skip_special_tokens=True)
    return text


def _count_tokens(documents: list[Any], tokenizer: Tokenizer, config: DataConfig) -> int:
    """Tokens of documents in a cache."""
    if not documents:
        return 0
    if isinstance(documents[0], TokenizedText):
        return sum(map(len, documents))
    return len(tokenize(documents, tokenizer, config).tokens)
