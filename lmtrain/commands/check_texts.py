"""`lmtrain preprocess CONFIG --check-contamination TASKS`: training text that is also in benchmarks, and duplicates."""

import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lmtrain.data.config import DataConfig
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.check_texts import CheckedSource, CheckJob
from lmtrain.preprocess.executor import choose_executor
from lmtrain.preprocess.prepare_demo import prepare_demo
from lmtrain.preprocess.recipe import Dropped, chat_template_of
from lmtrain.preprocess.sources import AnySource, has_text, list_sources
from lmtrain.preprocess.split_cache import make_folder
from lmtrain.preprocess.text_matches import BenchmarkIndex, DocumentHashes, build_index, save_index
from lmtrain.preprocess.token_sources import TokenSource
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.redact import redact
from lmtrain.runtime.signals import StopRequest
from lmtrain.runtime.storage import join, write_bytes, write_json

if TYPE_CHECKING:
    from lmtrain.evaluation.benchmarks.tasks import BenchmarkItem

REPORT = "check.json"
_INDEX = "benchmarks.npz"
_SHOWN = 5


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
        CheckJob(source=source, config=split.config, index=index_url, template=chat_template_of(split.config))
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
    """What was found, by split of each source."""
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
    """The report as text."""
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
