"""Validation sets as global batches on the devices, in order, from the beginning each time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.data.batches import EvalSource, iterate, open_cache
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import local_rows, place_batch


@dataclass(frozen=True)
class ValidationSet:
    """Iterating gives its batches, of which there are `len(self)`."""

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
    """Those of a run by name; a run with one source calls it "". `max_batches` of each are taken, None for all.

    Raises `UserError` for a set that does not hold one sequence.
    """
    rows = local_rows(layout.batch, batch_size)
    sets = {}
    for name, cache in caches.items():
        store = open_cache(config, cache, seq_len)
        apart, positions = config.mask_across_documents, config.reset_positions
        source = EvalSource(store, seq_len, batch_size, rows, max_batches, apart, positions)
        if len(source) < source.whole:
            log.info(
                f"evaluation takes {len(source):,} of {source.whole:,} batches of {cache.folder} "
                "(trainer.max_eval_batches): losses are those of this part"
            )
        sets[name] = ValidationSet(source, layout)
    return sets
