"""Hugging Face datasets as sources: cut into shards by their own size, never by who reads them."""

import functools
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmtrain.config.errors import UserError
from lmtrain.data.config import SourceConfig
from lmtrain.hf.hub import prepare_hub
from lmtrain.preprocess.text import Field, Record

# Rows of a downloaded data set are cut into shards of about this size; a stream has the shards its files make.
_SHARD_BYTES = 256_000_000


@dataclass(frozen=True)
class DatasetShard:
    """Part `index` of `count` of one split. `bytes` is its share of the whole, 0 for a stream, which does not know."""

    url: str
    bytes: int
    fingerprint: str
    id: str
    name: str | None
    split: str
    stream: bool
    index: int
    count: int

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.url


def dataset_splits(config: SourceConfig) -> list[str]:
    """The names of the splits of the data set `config.id`."""
    assert config.id is not None
    return list(_load(config.id, config.name, config.stream))


def list_dataset_shards(config: SourceConfig, split: str) -> list[DatasetShard]:
    """The shards of one split. Raises `UserError` if the data set or the split is not to be had."""
    assert config.id is not None
    splits = _load(config.id, config.name, config.stream)
    label = f"dataset {config.id}{f' {config.name}' if config.name else ''} {split}"
    if split not in splits:
        raise UserError(f"{label}: no such split; it has {', '.join(splits)}")
    dataset = splits[split]
    if config.stream:
        count, size = dataset.num_shards, 0
        digest = _digest(label, count, sorted(dataset.features or {}))
    else:
        size = dataset.data.nbytes
        count = min(max(1, math.ceil(size / _SHARD_BYTES)), max(1, len(dataset)))
        digest = _digest(label, len(dataset), size, dataset[:1], dataset[-1:] if len(dataset) else None)
    return [
        DatasetShard(
            url=label if count == 1 else f"{label} {index + 1}/{count}",
            bytes=size // count,
            fingerprint=digest,
            id=config.id,
            name=config.name,
            split=split,
            stream=config.stream,
            index=index,
            count=count,
        )
        for index in range(count)
    ]


class DatasetReader:
    """Iterates over the records of a shard, rows counted from 1 within it. `position` is in bytes of the shard."""

    def __init__(self, shard: DatasetShard, field: Field):
        self.position = 0
        self._shard = shard
        self._field = field

    def __iter__(self) -> Iterator[Record]:
        shard = self._shard
        dataset = _load(shard.id, shard.name, shard.stream)[shard.split].shard(shard.count, shard.index)
        rows = 0 if shard.stream else len(dataset)
        for number, row in enumerate(dataset, start=1):
            yield number, self._field.read(row, f"{shard.url}:{number}")
            self.position = shard.bytes * number // max(rows, 1)


@functools.cache
def _load(id: str, name: str | None, stream: bool) -> Any:
    """All splits; what is downloaded stays in the libraries' own cache."""
    prepare_hub()
    import datasets

    datasets.disable_progress_bars()
    label = f"data.id: {id}{f' ({name})' if name else ''}"
    try:
        return datasets.load_dataset(id, name, streaming=stream)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise UserError(
            f"{label}: not found locally or on the Hugging Face Hub: {str(error).splitlines()[0]}\n"
            "  without a network, name a local folder or files (data.train_urls); a gated data set needs HF_TOKEN"
        ) from None
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{label}: {str(error).splitlines()[0]}") from None


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
