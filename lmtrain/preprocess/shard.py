"""One input file -> one finished shard. Runs in a worker process; imports no JAX."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from lmtrain.config.errors import UserError
from lmtrain.data.manifest import BLOCK_TOKENS, ENDS_PER_RECORD, ShardInfo
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.preprocess.documents import DocumentReader
from lmtrain.preprocess.long_documents import can_split
from lmtrain.preprocess.sources import AnySource
from lmtrain.preprocess.tokenize import DocumentSettings, token_dtype, tokenize_batch
from lmtrain.runtime.files import write_json

# Enough text to keep the tokenizer's threads busy, little enough to hold many times over.
_BATCH_CHARACTERS = 2_000_000
_BATCH_DOCUMENTS = 1024

# Random reads take one block at a time, so records are neither grouped nor compressed: token ids do not compress.
_WRITER_OPTIONS = "group_size:1,uncompressed"

Report = Callable[[int, int, int], None]


@dataclass(frozen=True)
class ShardJob:
    """All that determines a shard. `path` is without extension, `tokenizer` a folder."""

    source: AnySource
    path: str
    tokenizer: str
    settings: DocumentSettings
    recipe: dict[str, Any]
    max_document_bytes: int = 10_000_000
    max_bad_fraction: float = 0.01


def build_shard(job: ShardJob, report: Report) -> ShardInfo:
    """Tokenize the file and write the shard, then its marker. `report(documents, tokens, input bytes)` gets increments.

    A killed build leaves a temporary file and no marker; a finished one always has the same bytes.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    temporary = f"{job.path}.arrayrecord.tmp-{os.getpid()}"
    writer = ArrayRecordWriter(temporary, _WRITER_OPTIONS)
    blocks = _BlockWriter(writer, token_dtype(tokenizer.vocab_size))
    reader = DocumentReader(job.source, job.settings.text_key, skip_bad=job.settings.on_bad_record == "skip")
    split_long = can_split(tokenizer.backend)
    longest = None if split_long else job.max_document_bytes
    position = 0
    for texts in _batches(reader, job.source.url, longest):
        tokens, lengths = tokenize_batch(texts, tokenizer, job.settings, split_long)
        blocks.add(tokens, lengths)
        report(len(texts), len(tokens), reader.position - position)
        position = reader.position
    _check_bad_share(reader, blocks.documents, job)
    blocks.finish()
    writer.close()
    file = f"{job.path}.arrayrecord"
    _flush(temporary)
    os.replace(temporary, file)
    info = ShardInfo(
        file=os.path.basename(file),
        source=asdict(job.source),
        bytes=os.path.getsize(file),
        sha256=_sha256(file),
        tokens=blocks.tokens,
        documents=blocks.documents,
        blocks=blocks.blocks,
        skipped=reader.skipped,
        bad_records=reader.bad_records,
    )
    write_json(f"{job.path}.json", {"recipe": job.recipe, "shard": asdict(info)})
    return info


def _check_bad_share(reader: DocumentReader, documents: int, job: ShardJob) -> None:
    if reader.skipped > job.max_bad_fraction * (reader.skipped + documents):
        told = "\n".join(f"  {record}" for record in reader.bad_records)
        raise UserError(
            f"{job.source.url}: {reader.skipped:,} of {reader.skipped + documents:,} records are bad, more than "
            f"data.max_bad_fraction {job.max_bad_fraction}; the first are\n{told}"
        )


def _batches(reader: DocumentReader, url: str, longest: int | None) -> Iterator[list[str]]:
    """Texts to tokenize in one call. Raises `UserError` for one of more than `longest` bytes."""
    texts: list[str] = []
    characters = 0
    for number, text in reader:
        if longest is not None and len(text) * 4 > longest and len(text.encode()) > longest:
            raise UserError(
                f"{url}:{number}: a document of {len(text.encode()):,} bytes is longer than data.max_document_bytes "
                f"{longest:,}; its tokenizer needs a hundred times that in memory, and cannot split it safely"
            )
        texts.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS or len(texts) >= _BATCH_DOCUMENTS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


class _BlockWriter:
    """Cuts a stream of tokens into records of `BLOCK_TOKENS`, and remembers where documents end."""

    def __init__(self, writer: Any, dtype: np.dtype):
        self._writer = writer
        self._pending = np.zeros(0, dtype)
        self._ends: list[np.ndarray] = []
        self.tokens = 0
        self.documents = 0
        self.blocks = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self._ends.append(self.tokens + np.cumsum(lengths).astype("<u8"))
        self.tokens += len(tokens)
        self.documents += len(lengths)
        waiting = np.concatenate([self._pending, tokens])
        whole = len(waiting) - len(waiting) % BLOCK_TOKENS
        for start in range(0, whole, BLOCK_TOKENS):
            self._write_block(waiting[start : start + BLOCK_TOKENS])
        self._pending = waiting[whole:]

    def finish(self) -> None:
        if len(self._pending):
            self._write_block(self._pending)
        ends = np.concatenate(self._ends) if self._ends else np.zeros(0, "<u8")
        for start in range(0, len(ends), ENDS_PER_RECORD):
            self._writer.write(ends[start : start + ENDS_PER_RECORD].tobytes())

    def _write_block(self, tokens: np.ndarray) -> None:
        self._writer.write(tokens.tobytes())
        self.blocks += 1


def _flush(path: str) -> None:
    """Make sure the data is on disk before its name is."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
