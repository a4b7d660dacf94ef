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
from lmtrain.sharding.placement import local_rows, place_batch


@dataclass(frozen=True)
class ValidationSet:
    """A validation set; iterating yields its `len(self)` batches."""

    source: EvalSource
    layout: Layout

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        source = self.source
        for batch in iterate(source):
            yield place_batch(batch, self.layout.batch, source.rows, source.batch_size)


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
    rows = local_rows(layout.batch, batch_size)
    sets = {}
    for name, cache in caches.items():
        store = open_cache(config, cache, seq_len)
        apart, positions = config.mask_across_documents, config.reset_positions
        source = EvalSource(store, seq_len, batch_size, rows, max_batches, apart, positions)
        if len(source) < source.all_batches:
            log.info(
                f"evaluation uses {len(source):,} of {source.all_batches:,} batches of {cache.folder} "
                "(trainer.max_eval_batches)"
            )
        FirstTargets(config, cache, seq_len, None if max_batches is None else max_batches * batch_size).found()
        sets[name] = ValidationSet(source, layout)
    return sets
