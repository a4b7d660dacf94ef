"""Build of one shard from one source. Runs in a worker process; imports no JAX."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from lmtrain.config.errors import UserError
from lmtrain.data.cache_manifest import BLOCK_TOKENS, ShardInfo
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.preprocess.document_settings import DocumentSettings, token_dtype
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.instructions import instruction_reader
from lmtrain.preprocess.long_documents import can_split, split_document
from lmtrain.preprocess.sources import AnySource
from lmtrain.preprocess.text import Instruction, Text
from lmtrain.preprocess.tokenize import tokenize_batch
from lmtrain.preprocess.tokenize_instructions import tokenize_instructions
from lmtrain.runtime.atomic_files import file_sha256
from lmtrain.runtime.storage import is_url, upload, write_json

# Maximum size of one batch: keeps the tokenizer's threads busy, and fits in memory many times.
_BATCH_CHARACTERS = 2_000_000
_BATCH_DOCUMENTS = 1024

# Random reads take one block at a time, so records are neither grouped nor compressed: token ids do not compress.
_WRITER_OPTIONS = "group_size:1,uncompressed"

# Number of counts of a job: documents, tokens, bytes of input as stored, bytes of text.
COUNTS = 4
Report = Callable[[int, int, int, int], None]


@dataclass(frozen=True)
class ShardJob:
    """Everything that determines a shard. `path` has no extension; `vocab_size` is for passthrough only, `template` for
    conversations."""

    source: AnySource
    path: str
    tokenizer: str
    settings: DocumentSettings
    recipe: dict[str, Any]
    max_document_bytes: int = 10_000_000
    max_bad_fraction: float = 0.01
    vocab_size: int | None = None
    template: ChatTemplate | None = None


def build_shard(job: ShardJob, report: Report) -> ShardInfo:
    """Tokenize the source and write the shard, then its marker.

    `report(documents, tokens, input bytes, text bytes)` is called with increments. A killed build leaves a temporary
    file and no marker; a finished one always has the same bytes.
    """
    tokenizer = open_tokenizer(job.tokenizer, job.vocab_size)
    split_long = tokenizer.library is not None and can_split(tokenizer.library)
    file = f"{job.path}.arrayrecord"
    skip_bad = job.settings.on_bad_record == "skip"
    instructions = instruction_reader(job.settings.format, job.template)
    reader = DocumentReader(
        job.source, job.settings.text_key, skip_bad, job.vocab_size, job.settings.text_documents, instructions
    )
    with _temporary(file) as temporary:
        with _written(temporary) as writer:
            blocks = _BlockWriter(writer, token_dtype(tokenizer.vocab_size), has_targets=instructions is not None)
            position = spelled = without = 0
            for texts in _batches(reader, tokenizer, split_long, job.max_document_bytes):
                targets = None
                if instructions is None:
                    tokens, lengths = tokenize_batch(texts, tokenizer, job.settings, split_long)
                else:
                    documents = [one for one in texts if isinstance(one, Instruction)]
                    found = tokenize_instructions(documents, tokenizer, job.settings)
                    tokens, lengths, targets = found.tokens, found.lengths, found.targets
                    spelled, without = spelled + found.spelled, without + found.without_targets
                blocks.add(tokens, lengths, targets)
                report(len(texts), len(tokens), reader.position - position, _text_bytes(texts))
                position = reader.position
            _check_bad_share(reader, blocks.documents, job)
            blocks.finish()
        info = ShardInfo(
            file=file.rpartition("/")[2],
            source=asdict(job.source),
            targets=blocks.targets,
            warnings=_warnings(job, blocks.documents, spelled, without),
            bytes=os.path.getsize(temporary),
            sha256=file_sha256(temporary),
            tokens=blocks.tokens,
            documents=blocks.documents,
            skipped=reader.skipped,
            bad_records=reader.bad_records,
        )
        _publish(temporary, file)
    write_json(f"{job.path}.json", {"recipe": job.recipe, "shard": info.described})
    return info


def _warnings(job: ShardJob, documents: int, spelled: int, without: int) -> list[str]:
    """What to tell about instructions: how many spell special tokens, and how many have no targets."""
    found = []
    if spelled:
        found.append(
            f"{job.source.label}: the contents of {spelled:,} of {documents:,} documents spell special tokens, which "
            "are encoded as such, as in transformers"
        )
    if without:
        found.append(
            f"{job.source.label}: {without:,} of {documents:,} documents have no target token, such as no message of "
            "the assistant; they are read without a loss"
        )
    return found


def _check_bad_share(reader: DocumentReader, documents: int, job: ShardJob) -> None:
    if reader.skipped > job.max_bad_fraction * (reader.skipped + documents):
        shown = "\n".join(f"  {record}" for record in reader.bad_records)
        raise UserError(
            f"{job.source.label}: {reader.skipped:,} of {reader.skipped + documents:,} records are bad, more than "
            f"data.max_bad_fraction {job.max_bad_fraction}; the first are\n{shown}"
        )


def _batches(reader: DocumentReader, tokenizer: Tokenizer, split_long: bool, longest: int) -> Iterator[list[Text]]:
    """Batches of documents to tokenize in one call. Raises `UserError` for a piece of more than `longest` bytes."""
    texts: list[Text] = []
    characters = 0
    for number, text in reader:
        if isinstance(text, Instruction) and len(text.text.encode()) > longest:
            raise UserError(
                f"{reader.place(number)}: a document of {len(text.text.encode()):,} bytes is longer than "
                f"data.max_document_bytes {longest:,}"
            )
        if isinstance(text, str) and len(text) * 4 > longest:
            pieces = split_document(text) if split_long else [text]
            size = max(len(piece.encode()) for piece in pieces)
            if size > longest:
                document = f"a document of {len(text.encode()):,} bytes"
                part = f"{document} has a block of {size:,} bytes without spaces, which" if split_long else document
                raise UserError(
                    f"{reader.place(number)}: {part} is longer than data.max_document_bytes {longest:,}; the tokenizer "
                    "uses 100 times that in memory and cannot split it safely"
                )
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _text_bytes(texts: list[Text]) -> int:
    """Size of the texts in UTF-8; 0 for documents that are token ids."""
    whole = (text.text if isinstance(text, Instruction) else text for text in texts)
    return sum(len(text.encode()) for text in whole if isinstance(text, str))


@contextmanager
def _temporary(file: str) -> Iterator[str]:
    """Temporary path to write before `file` is published: next to it, or for a URL in a local temporary folder."""
    if is_url(file):
        with tempfile.TemporaryDirectory(prefix="lmtrain-") as folder:
            yield f"{folder}/shard"
    else:
        yield f"{file}.tmp-{os.getpid()}"


@contextmanager
def _written(path: str) -> Iterator[Any]:
    """An ArrayRecord writer, closed at the end. Raises `UserError` if the disk is full."""
    try:
        writer = ArrayRecordWriter(path, _WRITER_OPTIONS)
        yield writer
        writer.close()
    except RuntimeError as error:  # its only error class; it may be raised long after the failed write
        if path not in str(error):
            raise
        reason = str(error).splitlines()[0].partition(";")[0].removeprefix("write() failed: ")
        raise UserError(f"{path}: cannot be written: {reason}; finished shards are kept") from None


def _publish(temporary: str, file: str) -> None:
    """Publish a complete shard under its name."""
    if is_url(file):
        upload(temporary, file)
        return
    with open(temporary, "rb") as opened:
        os.fsync(opened.fileno())  # the data must reach the disk before the rename
    os.replace(temporary, file)


class _BlockWriter:
    """Writes a stream of tokens as records of `BLOCK_TOKENS`, each with the ends of the documents in it.

    A document ends in the block of its last token; an empty document ends in the block of the next token. With
    `has_targets` the records have format 3, and `targets` counts the target tokens.
    """

    def __init__(self, writer: Any, dtype: np.dtype, has_targets: bool = False):
        self._writer = writer
        self._bits = np.zeros(0, bool) if has_targets else None  # of the pending tokens
        self._lengths: list[np.ndarray] = []
        self.targets = 0 if has_targets else None
        self._pending = np.zeros(0, dtype)  # tokens after the last complete block
        self._ends = np.zeros(0, np.int64)  # document ends among them, relative to the first pending token
        self.tokens = 0
        self.documents = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray, targets: np.ndarray | None = None) -> None:
        ends = len(self._pending) + np.cumsum(lengths)
        blocks = np.where(lengths > 0, ends - 1, ends) // BLOCK_TOKENS
        self.tokens += len(tokens)
        self.documents += len(lengths)
        waiting = np.concatenate([self._pending, tokens])
        if self._bits is not None and targets is not None and self.targets is not None:
            self._bits = np.concatenate([self._bits, targets])
            self._lengths.append(lengths)
            self.targets += int(targets.sum())
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
        if self._bits is not None:
            self._writer.write(np.concatenate([np.zeros(0), *self._lengths]).astype("<u4").tobytes())

    def _write(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        bits = b""
        if self._bits is not None:
            bits = np.packbits(self._bits[: len(tokens)], bitorder="little").tobytes()
            self._bits = self._bits[len(tokens) :]
        self._writer.write(tokens.tobytes() + ends.astype("<u2").tobytes() + bits)
