"""The interface of evaluators, the context they get, and their validation sets: training and `lmtrain eval` use only
this.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmtrain.data.batches import EvalSource, iterate, open_cache
from lmtrain.data.caches import Cache
from lmtrain.data.config import DataConfig
from lmtrain.data.targets import FirstTargets
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.models.interface import LanguageModel
from lmtrain.objectives.interface import Loss
from lmtrain.runtime.logging import ALONE, Processes, log
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
        source = EvalSource(
            store=store,
            seq_len=seq_len,
            batch_size=batch_size,
            rows=part.rows,
            max_batches=max_batches,
            mask_across_documents=apart,
            reset_positions=positions,
            columns=part.columns,
        )
        if len(source) < source.all_batches:
            log.info(
                f"evaluation uses {len(source):,} of {source.all_batches:,} batches of {cache.folder} "
                "(trainer.max_eval_batches)"
            )
        FirstTargets(config, cache, seq_len, None if max_batches is None else max_batches * batch_size).found()
        sets[name] = ValidationSet(source, part)
    return sets


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an evaluation may use. Its parameters are placed on `layout`; it computes in `compute_dtype`.

    `seq_len` is the model's context in tokens, `folder` the run's log folder, `loss` the run's main one, None without
    text; with `enforce_bos` documents start with the BOS token. `batch_size` is the number of sequences of
    `seq_len` tokens in a batch, on all devices. Call `check_stop()` between batches, equally often in all processes; it
    raises `StoppedError` if the run has to stop. `progress(done, total, what)` may be called equally often.
    """

    model: LanguageModel
    layout: Layout
    compute_dtype: str
    tokenizer: Tokenizer
    sets: Mapping[str, ValidationSet]
    seq_len: int
    batch_size: int = 1
    processes: Processes = ALONE
    folder: str = ""
    loss: Loss | None = None
    enforce_bos: bool = False
    xla_options: Mapping[str, Any] = field(default_factory=dict)
    check_stop: Callable[[], None] = _nothing
    progress: Callable[[int, int, str], None] = _nothing

    def between_batches(self, what: str) -> Callable[[], None]:
        """What to call after each batch of all sets: it ends a run that has to stop, and shows the progress."""
        done, total = itertools.count(1), sum(map(len, self.sets.values()))

        def between() -> None:
            self.check_stop()
            self.progress(next(done), total, what)

        return between


class Evaluator(Protocol):
    """One way to measure a model. Every process of a run calls it, with the same parameters.

    `name` is part of the names of its metrics: `eval/<name>/...`; `every` is its interval in steps, None for the last
    step only. Errors of an `optional` evaluator are logged, and training continues.
    """

    name: str
    every: int | None
    optional: bool

    def prepare(self, context: Context) -> bool:
        """Called once, before the first step. False if there is nothing to evaluate; it is then never called again.

        Raises `UserError` for settings that do not fit the run.
        """

    def evaluate(self, params: Any, step: int) -> Mapping[str, float | str]:
        """Metrics of `params` after `step` updates; names are without the prefix `eval/<name>/`.

        A string is a text to log under its prompt, without a prefix; that of averaged parameters takes precedence.
        """

    def describe(self, metrics: Mapping[str, Any]) -> str:
        """One line for the log. `metrics` have full names and may include those of averaged parameters; and texts."""
