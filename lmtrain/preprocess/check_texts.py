"""`lmtrain preprocess CONFIG --check-contamination TASKS`: training text that is also in benchmarks, and duplicates.

Workers run a `CheckJob` for each source, which finds documents with parts of benchmark items, and hashes to find
duplicates.
"""

import functools
import io
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.data.config import DataConfig
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.executor import Report, choose_executor
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.recipe import Dropped, chat_template_of
from lmtrain.preprocess.record_reader import open_documents
from lmtrain.preprocess.records import Document, TokenizedText, texts_of
from lmtrain.preprocess.sources import AnySource, has_text, list_sources
from lmtrain.preprocess.split_cache import make_folder
from lmtrain.preprocess.text_matches import (
    BenchmarkIndex,
    DocumentHashes,
    build_index,
    load_index,
    save_index,
    text_hashes,
    words_of,
)
from lmtrain.preprocess.token_sources import TokenSource, documents_in_place
from lmtrain.preprocess.tokenize import tokenize
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.redact import redact
from lmtrain.runtime.signals import StopRequest
from lmtrain.runtime.storage import join, read_bytes, write_bytes, write_json

if TYPE_CHECKING:
    from lmtrain.evaluation.benchmarks.tasks import BenchmarkItem

REPORT = "check.json"
_INDEX = "benchmarks.npz"
_SHOWN = 5

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
    split: str
    index: str | None
    template: ChatTemplate | None = None

    def run(self, report: Report) -> CheckedSource:
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
                    overlap = Overlap(
                        document=group[hit.text][0],
                        character=words.character(hit.first),
                        task=task,
                        item=item,
                        words=hit.last - hit.first + 1,
                        text=words.between(hit.first, hit.last)[:_SHOWN_CHARACTERS],
                    )
                    found.overlaps.append(overlap)
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
        reader = open_documents(self.source, self.config, tokenizer.vocab_size, self.template, split=self.split)
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
    if not documents:
        return 0
    if isinstance(documents[0], TokenizedText):
        return sum(map(len, documents))
    return len(tokenize(documents, tokenizer, config).tokens)


@dataclass(kw_only=True)
class _Split:
    """The sources of one split of one source of a mixture, and what was found in each."""

    name: str
    split: str
    config: DataConfig
    sources: list[AnySource]
    first: int  # number of its first source among all
    checked: dict[int, CheckedSource] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name}/{self.split}" if self.name else self.split


def check_texts(
    config: RunConfig,
    items: Iterable["BenchmarkItem"] | None,
    size: int,
    drop: bool,
    drop_duplicates: bool,
    processes: Processes,
    stop: StopRequest,
) -> dict[str, Dropped]:
    """Search the text of a config for `items` by n-grams of `size` words, and for documents that occur twice.

    Writes a report to data.cache_dir and logs it. -> the training documents to drop, by source. Raises `UserError` as
    tokenizing does, and `StoppedError` after a request to `stop`.
    """
    if processes.count > 1:
        raise UserError(
            "--check-contamination and --drop-duplicates: run them in one process, on one machine or on the Ray "
            "cluster at trainer.ray.address"
        )
    splits = _splits(config.data)
    make_folder(join(config.data.cache_dir))
    index = None if items is None else build_index(list(items), size)
    index_url = None
    if index is not None:
        index_url = join(config.data.cache_dir, _INDEX)
        write_bytes(index_url, save_index(index))
    jobs = [
        CheckJob(
            source=source,
            config=split.config,
            split=split.split,
            index=index_url,
            template=chat_template_of(split.config),
        )
        for split in splits
        for source in split.sources
    ]
    executor = choose_executor(config.trainer.ray, config.data.num_preprocess_workers, processes)
    total = max(1, sum(job.source.bytes for job in jobs))
    with tempfile.TemporaryDirectory(prefix="lmtrain-") as folder, Progress("check", total) as progress:
        hashes = DocumentHashes(folder)

        def on_counts(counts: Any) -> None:
            progress.update(int(counts[:, 2].sum()), f"{int(counts[:, 0].sum()):,} documents")

        for number, result in executor.run(jobs, on_counts, lambda: stop.requested):
            hashes.add(number, result.hashes)
            split = next(split for split in reversed(splits) if split.first <= number)
            result.hashes = np.zeros(0, np.uint64)  # of millions of documents; they are in the files now
            split.checked[number] = result
        train = [split for split in splits if split.split == "train"]
        numbers = {split.label: range(split.first, split.first + len(split.sources)) for split in splits}
        # validation first: its documents are the first occurrence, and none of training is left twice
        order = [n for split in sorted(splits, key=lambda s: s.split == "train") for n in numbers[split.label]]
        repeated, pairs = hashes.find(order)
    owner = {number: split.label for split in splits for number in numbers[split.label]}
    counts = Counter[tuple[str, str]]()
    for (mine, theirs), count in pairs.items():
        counts[owner[mine], owner[theirs]] += count
    report = _report(splits, index, counts)
    write_json(join(config.data.cache_dir, REPORT), redact(report))
    for line in _lines(report):
        log.info(line)
    log.info(f"places and texts: {redact(join(config.data.cache_dir, REPORT))}")
    dropped = {}
    if drop or drop_duplicates:
        recipe: dict[str, Any] = {"duplicates": True} if drop_duplicates else {}
        if drop and index is not None:
            recipe["contamination"] = {"ngram": size, "benchmarks": index.digest}
        for split in train:
            documents = {}
            for number, checked in split.checked.items():
                which = (checked.contaminated & drop) | (repeated[number] & drop_duplicates)
                if which.any():
                    documents[number - split.first] = which
                    source = split.sources[number - split.first]
                    if isinstance(source, TokenSource):
                        raise UserError(f"{source.label}: is read in place, so none of its documents can be dropped")
            dropped[split.name] = Dropped(recipe, documents)
    return dropped


def _splits(config: DataConfig) -> list[_Split]:
    found, number = [], 0
    for name, source in config.sources().items():
        for split in ("train", "validation"):
            if not has_text(source, split):
                continue
            prepare_demo(source)
            tokenizer = open_tokenizer(source.tokenizer, source.vocab_size)
            sources = list_sources(source, split, tokenizer)
            found.append(_Split(name=name, split=split, config=source, sources=sources, first=number))
            number += len(sources)
    return found


def _report(splits: list[_Split], index: BenchmarkIndex | None, pairs: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    report: dict[str, Any] = {"sources": {}}
    tasks = Counter(task for task, _ in index.names) if index is not None else Counter[str]()
    if index is not None:
        report["benchmarks"] = {
            task: {"items": count, "too_short": index.short[task]} for task, count in sorted(tasks.items())
        }
        report["ngram"] = index.size
    for split in splits:
        checked = list(split.checked.values())
        by_task = sum((each.by_task for each in checked), start=Counter[str]())
        items = {task: set().union(*(each.items.get(task, set()) for each in checked)) for task in by_task}
        report["sources"][split.label] = {
            "documents": sum(each.documents for each in checked),
            "contaminated": {
                task: {"documents": count, "items": len(items[task])} for task, count in sorted(by_task.items())
            },
            "contaminated_documents": int(sum(each.contaminated.sum() for each in checked)),
            "contaminated_tokens": sum(each.tokens for each in checked),
            "duplicates": {theirs: count for (mine, theirs), count in sorted(pairs.items()) if mine == split.label},
            "overlaps": [asdict(overlap) for _, each in sorted(split.checked.items()) for overlap in each.overlaps],
        }
    return report


def _lines(report: Mapping[str, Any]) -> Iterable[str]:
    for task, about in report.get("benchmarks", {}).items():
        short = f", {about['too_short']:,} of them too short for it" if about["too_short"] else ""
        yield f"{task}: searched for {counted(about['items'], 'item')} by {report['ngram']} words{short}"
    for label, found in report["sources"].items():
        yield f"{label}: {counted(found['documents'], 'document')}"
        for task, numbers in found["contaminated"].items():
            yield (
                f"  {counted(numbers['documents'], 'document')} with words of {counted(numbers['items'], 'item')} of "
                f"{task}"
            )
        for overlap in found["overlaps"][:_SHOWN]:
            yield (
                f"    {overlap['document']}, character {overlap['character']:,}: {overlap['words']} words of "
                f"{overlap['task']} item {overlap['item']}: {overlap['text']!r}"
            )
        if found["contaminated_documents"]:
            yield (
                f"  together {counted(found['contaminated_documents'], 'document')} of "
                f"{found['contaminated_tokens']:,} tokens"
            )
        for other, count in found["duplicates"].items():
            where = "that it has before" if other == label else f"of {other}"
            yield f"  duplicates: {counted(count, 'document')} {where}"
