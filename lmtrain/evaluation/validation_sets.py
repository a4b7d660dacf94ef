"""Validation sets as global batches on the devices, in a fixed order that restarts at each iteration."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.data.batches import EvalSource, iterate, open_cache
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.data.targets import FirstTargets
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import LocalPart


@dataclass(frozen=True)
class ValidationSet:
    """A validation set; iterating yields its `len(self)` batches."""

    source: EvalSource
    part: LocalPart

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        for batch in iterate(self.source):
            yield self.part.place(batch)


def open_validation_sets(
    config: DataConfig,
    caches: Mapping[str, Cache],
    layout: Layout,
    *,
    seq_len: int,
    batch_size: int,
    max_batches: int | None,
) -> dict[str, ValidationSet]:
    """The validation sets of a run by name; a single source has the name "". `max_batches` per set, None for all.

    Raises `UserError` for a set that is smaller than one sequence, or without targets.
    """
    part = LocalPart.of(layout.batch, batch_size, seq_len)
    sets = {}
    for name, cache in caches.items():
        store = open_cache(config, cache, seq_len)
        apart, positions = config.mask_across_documents, config.reset_positions
        source = EvalSource(store, seq_len, batch_size, part.rows, max_batches, apart, positions, part.columns)
        if len(source) < source.all_batches:
            log.info(
                f"evaluation uses {len(source):,} of {source.all_batches:,} batches of {cache.folder} "
                "(trainer.max_eval_batches)"
            )
        FirstTargets(config, cache, seq_len, None if max_batches is None else max_batches * batch_size).found()
        sets[name] = ValidationSet(source, part)
    return sets
