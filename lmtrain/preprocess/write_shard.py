"""Build of one shard from one source. Runs in a worker process; imports no JAX."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from lmtrain.data.cache_manifest import BLOCK_TOKENS, ShardInfo, has_targets
from lmtrain.data.config import DataConfig
from lmtrain.data.token_store import check_threads
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.executor import Report
from lmtrain.preprocess.recipe import token_dtype
from lmtrain.preprocess.record_reader import open_documents
from lmtrain.preprocess.records import Document, texts_of
from lmtrain.preprocess.sources import AnySource, Source, as_recorded, source_checksums, version_of
from lmtrain.preprocess.tokenize import TokenBatch, can_split, split_document, tokenize
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.storage import file_sha256, file_size, is_url, upload, write_json

# Maximum size of one batch: keeps the tokenizer's threads busy, and fits in memory many times.
_BATCH_CHARACTERS = 2_000_000
_BATCH_DOCUMENTS = 1024

# Random reads take one block at a time, so records are neither grouped nor compressed: token ids do not compress.
_WRITER_OPTIONS = "group_size:1,uncompressed"

# Warnings about documents, by the counts of `TokenBatch`.
WARNINGS = {
    "spelled": "the contents of {} spell special tokens, which are encoded as such, as in transformers",
    "without_targets": "{} have no target token, such as no message of the assistant; they are read without a loss",
    "unwritten": "the chat template does not write a message, a tool call or a tool of {} as it is; is a name in the "
    "template misspelt, such as message.contnt?",
    "unreasoned": "the chat template does not write the reasoning of {}, which is not learned",
    "unmarked": "the {{% generation %}} marks of the chat template leave out a reply or a tool call of {}",
    "endless": "the replies of {} end without a special token that is a target, so that a model does not learn to end "
    "them; put it inside of the marks of the chat template",
    "foreign": "the texts of {} end with the end of a turn of another template, such as </s>, which is no token here",
    "listed": "the answers of {} are lists of texts in JSON, which are learned as they are",
    "empty": "{} are empty, and are read as special tokens only",
    "doubled": "{} end with the EOS token or start with the BOS token, and get a second one; remove it from the text, "
    "or set data.enforce_eos or data.enforce_bos to false",
}


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """Everything that determines a shard. `path` has no extension; `template` is for conversations only.

    `dropped`: which documents are left out, bool [documents]; None: none.
    """

    source: AnySource
    path: str
    config: DataConfig
    recipe: dict[str, Any]
    split: str = "train"
    template: ChatTemplate | None = None
    dropped: np.ndarray | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def run(self, report: Report) -> ShardInfo:
        return build_shard(self, report)

    def counts(self, result: ShardInfo) -> tuple[int, int, int]:
        return result.documents or 0, result.tokens, self.source.bytes

    def check(self, result: ShardInfo) -> None:
        """Raise `UserError` if the shard is not on this machine."""
        if file_size(f"{self.path}.arrayrecord") != result.bytes:
            raise UserError(
                f"{self.path}.arrayrecord: built on another machine, not found on this one; data.cache_dir must be a "
                "folder that all machines of the Ray cluster share, or a URL"
            )


def build_shard(job: ShardJob, report: Report = lambda *_: None) -> ShardInfo:
    """Tokenize the source and write the shard, then its marker.

    `report(documents, tokens, input bytes)` is called with increments. A killed build leaves a temporary
    file and no marker; a finished one always has the same bytes.
    """
    tokenizer = open_tokenizer(job.config.tokenizer, job.config.vocab_size)
    split_long = tokenizer.library is not None and can_split(tokenizer.library)
    file = f"{job.path}.arrayrecord"
    labelled = has_targets(job.recipe)
    reader = open_documents(job.source, job.config, tokenizer.vocab_size, job.template, labelled, job.split)
    counts = dict.fromkeys(WARNINGS, 0)
    version = version_of(job.source)
    with _published(file) as temporary:
        with _written(temporary) as writer:
            blocks = _BlockWriter(writer, token_dtype(tokenizer.vocab_size), labelled)
            position, number, dropped, dropped_tokens = 0, 0, 0, 0
            for documents in _batches(reader, split_long, job.config.max_document_bytes):
                every = tokenize(documents, tokenizer, job.config, split_long)
                kept = np.ones(len(documents), bool)
                if job.dropped is not None:
                    kept = ~job.dropped[number : number + len(documents)]
                kept = np.repeat(kept, len(every.lengths) // len(documents))
                batch = every.only(kept)
                number += len(documents)
                dropped += len(kept) - len(batch.lengths)
                dropped_tokens += len(every.tokens) - len(batch.tokens)
                blocks.add(batch)
                counts = {name: count + getattr(batch, name) for name, count in counts.items()}
                report(len(batch.lengths), len(batch.tokens), reader.position - position)
                position = reader.position
            _check_bad_share(reader, job)
            blocks.finish()
        checksums = source_checksums(job.source) if isinstance(job.source, Source) else {}
        if version_of(job.source) != version:
            raise UserError(f"{job.source.label}: modified while it was read; run the same command again")
        info = ShardInfo(
            file=f"{job.name}.arrayrecord",
            source=as_recorded(job.source) | checksums,
            targets=blocks.targets,
            warnings=_warnings(job, reader.documents + reader.skipped, counts, blocks.documents) + reader.warnings,
            bytes=os.path.getsize(temporary),
            sha256=file_sha256(temporary),
            tokens=blocks.tokens,
            documents=blocks.documents,
            skipped=reader.skipped,
            bad_records=reader.bad_records,
            dropped=dropped,
            dropped_tokens=dropped_tokens,
        )
    with _naming(f"{job.path}.json"):
        write_json(f"{job.path}.json", {"recipe": job.recipe, "shard": info.described})
    return info


def _warnings(job: ShardJob, records: int, counts: dict[str, int], documents: int) -> list[str]:
    label = job.source.label
    is_part = isinstance(job.source, Source) and job.source.start is not None  # maybe the middle of a long line
    empty = [] if records or is_part else [f"{label}: no documents"]
    found = {WARNINGS[name]: f"{count:,} of {documents:,} documents" for name, count in counts.items() if count}
    return empty + [f"{label}: {warning.format(number)}" for warning, number in found.items()]


def _check_bad_share(reader: DocumentReader, job: ShardJob) -> None:
    records = reader.skipped + reader.documents
    if reader.skipped > job.config.max_bad_fraction * records:
        shown = "\n".join(f"  {record}" for record in reader.bad_records)
        raise UserError(
            f"{job.source.label}: {counted(reader.skipped, 'bad record')} of {records:,}, more than "
            f"data.max_bad_fraction {job.config.max_bad_fraction}; the first are\n{shown}"
        )


def _batches(reader: DocumentReader, split_long: bool, max_bytes: int) -> Iterator[list[Document]]:
    """Batches of documents to tokenize in one call. Raises `UserError` for a piece of more than `max_bytes`."""
    documents: list[Document] = []
    characters = 0
    for number, document in reader:
        if _size(document) > max_bytes:
            _check_pieces(document, split_long, max_bytes, reader.place(number))
        documents.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS or len(documents) >= _BATCH_DOCUMENTS:
            yield documents
            documents, characters = [], 0
    if documents:
        yield documents


def _check_pieces(document: Document, split_long: bool, max_bytes: int, place: str) -> None:
    """Raise `UserError` if a document cannot be split into pieces of at most `max_bytes`."""
    described, advice = f"a document of {_size(document):,} bytes", ""
    if isinstance(document, str):
        pieces = split_document(document) if split_long else [document]
        size = max(map(_size, pieces))
        if size <= max_bytes:
            return
        advice = "; the tokenizer uses 100 times that in memory and cannot split it safely"
        if split_long:
            described += f" has a block of {size:,} bytes without spaces, which"
    raise UserError(f"{place}: {described} is longer than data.max_document_bytes {max_bytes:,}{advice}")


def _size(document: Document) -> int:
    """Size of the text in UTF-8; 0 for a document of token ids."""
    return sum(len(text.encode()) for text in texts_of(document))


@contextmanager
def _published(file: str) -> Iterator[str]:
    """Temporary path of a file that is published at the end: next to it, or for a URL in a local temporary folder."""
    if is_url(file):
        with tempfile.TemporaryDirectory(prefix="lmtrain-") as folder:
            yield f"{folder}/shard"
            upload(f"{folder}/shard", file)
        return
    temporary = f"{file}.tmp-{os.getpid()}"
    yield temporary
    with _naming(file):
        with open(temporary, "rb") as opened:
            os.fsync(opened.fileno())  # the data must reach the disk before the rename
        os.replace(temporary, file)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Convert errors of writing into one that names the file, such as a full disk."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; finished shards are kept") from None


@contextmanager
def _written(path: str) -> Iterator[Any]:
    """An ArrayRecord writer, closed at the end. Raises `UserError` if the disk is full."""
    check_threads()
    try:
        writer = ArrayRecordWriter(path, _WRITER_OPTIONS)
        yield writer
        writer.close()
    except RuntimeError as error:  # its only error class; it may be raised long after the failed write
        if path not in str(error):
            raise
        reason = str(error).splitlines()[0].partition(";")[0].removeprefix("write() failed: ")
        raise UserError(f"{path}: cannot be written: {reason}; finished shards are kept") from None


class _BlockWriter:
    """Writes a stream of tokens as records of `BLOCK_TOKENS`, each with the ends of the documents in it.

    A document ends in the block of its last token; an empty document ends in the block of the next token. With
    `has_targets` the records have format 3, and `targets` counts the target tokens.
    """

    def __init__(self, writer: Any, dtype: np.dtype, has_targets: bool):
        self._writer = writer
        self.tokens = 0
        self.documents = 0
        self.targets = 0 if has_targets else None
        self._pending = np.zeros(0, dtype)  # tokens after the last complete block
        self._ends = np.zeros(0, np.int64)  # document ends among them, relative to the first pending token
        self._bits = np.zeros(0, bool)  # which of them are targets
        self._lengths = [np.zeros(0, np.int64)]

    def add(self, batch: TokenBatch) -> None:
        lengths = batch.lengths
        ends = len(self._pending) + np.cumsum(lengths)
        blocks = np.where(lengths > 0, ends - 1, ends) // BLOCK_TOKENS
        self.tokens += len(batch.tokens)
        self.documents += len(lengths)
        if self.targets is not None and batch.targets is not None:
            self._bits = np.concatenate([self._bits, batch.targets])
            self._lengths.append(lengths)
            self.targets += int(batch.targets.sum())
        waiting = np.concatenate([self._pending, batch.tokens])
        complete = len(waiting) // BLOCK_TOKENS
        for block in range(complete):
            start = block * BLOCK_TOKENS
            inside = ends[blocks == block] - start
            self._write(waiting[start : start + BLOCK_TOKENS], np.append(self._ends, inside))
            self._ends = self._ends[:0]
        self._pending = waiting[complete * BLOCK_TOKENS :]
        self._ends = np.append(self._ends, ends[blocks >= complete] - complete * BLOCK_TOKENS)

    def finish(self) -> None:
        if len(self._pending) or len(self._ends):
            self._write(self._pending, self._ends)
        if self.targets is not None:
            self._writer.write(np.concatenate(self._lengths).astype("<u4").tobytes())

    def _write(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        bits = np.packbits(self._bits[: len(tokens)], bitorder="little")  # none without targets
        self._bits = self._bits[len(tokens) :]
        self._writer.write(tokens.tobytes() + ends.astype("<u2").tobytes() + bits.tobytes())
