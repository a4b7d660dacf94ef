"""Hugging Face datasets as sources. Their shards depend on the dataset only, never on the number of readers."""

import functools
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmtrain.data.config import SourceConfig
from lmtrain.hf.hub import prepare_hub
from lmtrain.preprocess.records import Record, row_of_table
from lmtrain.runtime.errors import UserError

# Approximate size of the shards of a downloaded dataset; a stream has one shard per file.
_SHARD_BYTES = 256_000_000


@dataclass(frozen=True, kw_only=True)
class DatasetShard:
    """Part `index` of `count` of one split. `bytes` is its share of the size of the split, 0 for a stream (unknown).

    Of a dataset in a local folder, `files` is a hash of the names and sizes of its files, `modified` of their times.
    """

    url: str
    bytes: int
    fingerprint: str
    id: str
    name: str | None
    split: str
    stream: bool
    index: int
    count: int
    files: str | None = None
    modified: str | None = None

    @property
    def label(self) -> str:
        return self.url


def dataset_splits(config: SourceConfig) -> list[str]:
    """Names of the splits of the dataset `config.id`."""
    assert config.id is not None
    return list(_load(config.id, config.name, config.stream))


def list_dataset_shards(config: SourceConfig, split: str) -> list[DatasetShard]:
    """Shards of one split. Raises `UserError` if the dataset or the split is not found or unavailable."""
    assert config.id is not None
    splits = _load(config.id, config.name, config.stream)
    label = f"dataset {config.id}{f' {config.name}' if config.name else ''} {split}"
    if split not in splits:
        raise UserError(
            f"{label}: split not found; set data.split or data.validation_split to one that the dataset has: "
            f"{', '.join(splits)}"
        )
    dataset = splits[split]
    if config.stream:
        count, size = dataset.num_shards, 0
        digest = _digest(label, count, sorted(dataset.features or {}))
    else:
        size = dataset.data.nbytes
        count = min(max(1, math.ceil(size / _SHARD_BYTES)), max(1, len(dataset)))
        digest = _digest(label, len(dataset), size, dataset[:1], dataset[-1:] if len(dataset) else None)
    files, modified = folder_state(config.id)
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
            files=files,
            modified=modified,
        )
        for index in range(count)
    ]


def folder_state(id: str) -> tuple[str | None, str | None]:
    """Hashes of the names and sizes, and of the times of the files of a dataset; None if it is no local folder."""
    if not os.path.isdir(id):
        return None, None
    paths = [os.path.join(place, name) for place, _, names in os.walk(id) for name in names]
    shown = sorted(path for path in paths if "/." not in path[len(id) :] and os.path.exists(path))
    states = [os.stat(path) for path in shown]
    names = [os.path.relpath(path, id) for path in shown]
    return _digest(names, [state.st_size for state in states]), _digest([state.st_mtime_ns for state in states])


class DatasetRows:
    """Iterates over the rows of a shard, counted from 1. `position` is in bytes of the shard."""

    def __init__(self, shard: DatasetShard):
        self.position = 0
        self._shard = shard

    def __iter__(self) -> Iterator[Record]:
        shard = self._shard
        dataset = _load(shard.id, shard.name, shard.stream)[shard.split].shard(shard.count, shard.index)
        rows = 0 if shard.stream else len(dataset)
        for number, row in enumerate(dataset, start=1):
            yield number, row_of_table(row)
            self.position = shard.bytes * number // max(rows, 1)


@functools.cache
def _load(id: str, name: str | None, stream: bool) -> Any:
    """Load all splits; downloads are stored in the cache of the datasets library."""
    prepare_hub()
    import datasets

    datasets.disable_progress_bars()
    label = f"data.id: {id}{f' ({name})' if name else ''}"
    try:
        return datasets.load_dataset(id, name, streaming=stream)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise UserError(
            f"{label}: not found locally or on the Hugging Face Hub: {str(error).splitlines()[0]}\n"
            "  offline, set data.id to a local folder or data.train_urls to files; a gated dataset requires HF_TOKEN"
        ) from None
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"{label}: {str(error).splitlines()[0]}") from None


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
