"""The batches of a run for training and evaluation, from its caches to its devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.data.batches import EvalSource, TrainSource, iterate, open_cache
from lmtrain.data.caches import Cache, Caches, build_mixture, describe_epochs
from lmtrain.evaluation.interface import Context, ValidationSet, open_validation_sets
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run.config import RunConfig, data_seed
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import LocalPart
from lmtrain.tracking.open import Trackers
from lmtrain.train.program.program import Program
from lmtrain.train.start.resume import EVALUATION_PENDING


class TrainBatches:
    """Training batches. Created before any computation; raises `UserError` for missing or corrupt shards."""

    def __init__(self, config: RunConfig, caches: Caches, layout: Layout):
        self._sizes = config.trainer.batch_sizes
        self._data, self._sharding = config.data, layout.batch
        seed, seq_len = data_seed(config), config.model.seq_len
        self._parts = {size: LocalPart.of(layout.batch, size, seq_len) for size in self._sizes.all}
        self._source = TrainSource(
            stores=[open_cache(config.data, cache, seq_len) for cache in caches.train.values()],
            mixture=build_mixture(config.data, list(caches.train), self._sizes, seed),
            seq_len=seq_len,
            batch_sizes=self._sizes,
            rows={size: part.rows for size, part in self._parts.items()},
            num_steps=config.trainer.num_train_steps,
            shuffle=config.data.shuffle,
            seed=seed,
            mask_across_documents=config.data.mask_across_documents,
            reset_positions=config.data.reset_positions,
            loss_weights=None if config.loss_weights is None else [config.loss_weights[name] for name in caches.train],
            columns=next(iter(self._parts.values())).columns,
        )
        epochs = describe_epochs(config.data, caches.train, seq_len, self._sizes)
        for cache, epoch in zip(caches.train.values(), epochs, strict=True):
            log.info(f"{epoch}; data: {cache.folder}")

    def in_order(self, cache: Cache, batch_size: int) -> ValidationSet:
        """All sequences of a training cache in batches, in their order."""
        source, part = self._source, LocalPart.of(self._sharding, batch_size, self._source.seq_len)
        return ValidationSet(
            EvalSource(
                store=open_cache(self._data, cache, source.seq_len),
                seq_len=source.seq_len,
                batch_size=batch_size,
                rows=part.rows,
                max_batches=None,
                mask_across_documents=source.mask_across_documents,
                reset_positions=source.reset_positions,
                columns=part.columns,
            ),
            part,
        )

    def set_references(self, references: Sequence[np.ndarray]) -> None:
        """Add the values of the documents of each source, see `TrainSource`."""
        self._source = replace(self._source, references=references)

    def after(self, first_step: int) -> Iterator[Any]:
        """Global arrays, one batch for each step after `first_step` updates."""
        for step, batch in enumerate(iterate(self._source, first_step), start=first_step):
            yield self._parts[self._sizes.at(step)].place(batch)


def open_evaluation(
    program: Program, caches: Caches, tokenizer: Tokenizer, folder: str, processes: Processes = ALONE
) -> Context:
    """The validation sets and the rest of the evaluation context. Raises `UserError` for corrupt shards."""
    config = program.config
    return Context(
        model=program.model,
        layout=program.layout,
        compute_dtype=config.trainer.precision.compute,
        tokenizer=tokenizer,
        sets=open_validation_sets(
            config.data,
            caches.validation,
            program.layout,
            seq_len=config.model.seq_len,
            batch_size=program.batching.eval_batch,
            max_batches=config.trainer.max_eval_batches,
        ),
        seq_len=config.model.seq_len,
        batch_size=program.batching.eval_batch,
        processes=processes,
        folder=folder,
        loss=config.objective.build(config.z_loss_weight),
        enforce_bos=config.data.enforce_bos,
        xla_options=program.xla_options,
    )


def is_pending(own: Checkpoint | None, trackers: Trackers, processes: Processes = ALONE) -> bool:
    """Whether a signal ended the evaluation of the checkpoint that a run resumes from. The first process decides."""
    logged = any(name.startswith("eval/") for name in trackers.names)  # all metrics of an evaluation are logged at once
    pending = own is not None and EVALUATION_PENDING in own.read_run_info() and not logged
    return bool(gather(processes, "evaluation pending", pending)[0])
