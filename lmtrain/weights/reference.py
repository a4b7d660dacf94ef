"""The reference of preference tuning: the model that training starts from, and its log-probabilities of all answers.

They are computed on the devices before the first step, or by `lmtrain eval`, and stored next to each token cache under
a hash of the reference's parameters and of all else that determines them, followed by its checksum. With LoRA the
reference is the frozen base.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lmtrain.data.batches import EvalSource
from lmtrain.data.caches import Cache
from lmtrain.data.windows import PairWindows
from lmtrain.evaluation.eval_step import build_forward_step, read_ahead
from lmtrain.evaluation.interface import Context, ValidationSet
from lmtrain.lora.model import fingerprint
from lmtrain.models.interface import LanguageModel
from lmtrain.objectives.preferences import answer_log_probs
from lmtrain.run.config import RunConfig
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.errors import UserError, counted
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.runtime.progress import Progress
from lmtrain.runtime.storage import (
    UNUSED_SECONDS,
    is_url,
    join,
    read_bytes,
    read_reliably,
    remove_temporaries,
    write_bytes,
)
from lmtrain.sharding.mesh import Layout

# Part of the hash that names stored values: changes if the same inputs give other values.
_VERSION = 2

_CHECKSUM_BYTES = 32


@dataclass(kw_only=True)
class Reference:
    """The reference of a run with `config`: `model` has no adapters, and `load()` gives its parameters on `layout`. It
    is called only if some values are not stored yet. `digest` is the fingerprint of the parameters."""

    config: RunConfig
    model: LanguageModel
    layout: Layout
    digest: str
    load: Callable[[], Any]
    xla_options: Mapping[str, Any] = field(default_factory=dict)
    processes: Processes = ALONE
    _params: Any = field(default=None, init=False, repr=False)

    def forget(self) -> None:
        """Free the parameters: of a run that resumes, they are a second copy."""
        self._params = None

    def checked(self) -> "Reference":
        """The same, whose `load` raises `UserError` for parameters that are not those of the digest."""

        def load() -> Any:
            params = self.load()
            found = fingerprint(params, self.layout)
            if found != self.digest:
                raise UserError(
                    f"the model that this run started from has changed: it has the fingerprint {found[:12]}, but the "
                    f"run's reference {self.digest[:12]}; restore it, or start a new run with another trainer.id"
                )
            return params

        return replace(self, load=load)

    def add_to(self, caches: Mapping[str, Cache], evaluation: Context) -> Context:
        """The same evaluation with the log-probabilities of all answers in its validation sets."""
        sets = {}
        for name, own in evaluation.sets.items():
            values = self.log_probs(caches[name], own)
            sets[name] = replace(own, source=replace(own.source, reference=values))
        return replace(evaluation, sets=sets)

    def log_probs(self, cache: Cache, own: ValidationSet) -> np.ndarray:
        """The log-probability of each document in the batches of a cache, float32 [documents]; 0 in others.

        Raises `UserError` if the reference has changed.
        """
        path = join(cache.folder, f"reference-{key_of(self.digest, self.config, cache, own.source)}.npy")
        assert isinstance(own.source.windows, PairWindows)
        own.source.windows.for_evaluation()
        if self.processes.is_first and not is_url(cache.folder):
            remove_temporaries(cache.folder, "reference-", UNUSED_SECONDS)
        stored = read_values(path, own.source.windows.documents)
        if all(gather(self.processes, "reference is stored", stored is not None)):
            assert stored is not None
            log.info(f"reference {self.digest[:12]}: {path}")
            return stored
        values = self._compute(own, cache.folder)
        if self.processes.is_first:
            try:
                write_values(path, values)
            except (OSError, UserError) as error:
                log.warning(f"{path} cannot be written, so the next start computes its values again: {error}")
        return values

    def _compute(self, own: ValidationSet, folder: str) -> np.ndarray:
        windows, size = own.source.windows, own.source.batch_size
        assert isinstance(windows, PairWindows)
        if self._params is None:
            self._params = self.load()
        values = np.zeros(windows.documents, np.float32)
        pairs = counted(windows.documents // 2, "pair")
        log.info(f"reference {self.digest[:12]}: log-probabilities of {pairs} of {folder}, {len(own):,} batches")
        compute = self.config.trainer.precision.compute
        step = build_forward_step(self.model, self.layout, compute, answer_log_probs, self.xla_options)
        with Progress("reference", len(own), quiet=not self.processes.is_first) as progress:
            for number, sums in enumerate(read_ahead(step, self._params, own)):
                for row, of_documents in enumerate(np.asarray(sums)):
                    documents = windows.documents_of(number * size + row)
                    values[documents] = of_documents[: len(documents)]
                progress.update(number + 1, f"{number + 1:,}/{len(own):,} batches of {folder}")
        return values


def key_of(digest: str, config: RunConfig, cache: Cache, source: EvalSource) -> str:
    """A hash of all that determines the values: those of the reference with this digest in a run with this config."""
    precision = config.trainer.precision
    described = {
        "version": _VERSION,
        "reference": digest,
        "model": config.model.computation(),
        "cache": cache.identity,
        "too_long": cache.too_long,
        "seq_len": source.seq_len,
        "compute": [precision.compute, precision.products],
        "reset_positions": source.reset_positions,
        "mask_across_documents": source.mask_across_documents,
        "sequences": len(source) * source.batch_size if len(source) < source.all_batches else None,
    }
    if described["sequences"] is not None and source.store.pack != "first_fit":
        described["pack"] = source.store.pack  # which pairs these sequences have
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def write_values(path: str, values: np.ndarray) -> None:
    """Store values as a .npy file that is followed by its SHA-256."""
    file = io.BytesIO()
    np.save(file, values)
    write_bytes(path, file.getvalue() + hashlib.sha256(file.getvalue()).digest())


def read_values(path: str, documents: int) -> np.ndarray | None:
    """Stored values; None if there are none, or if they are not those of all documents, unchanged, which is logged."""
    try:
        content = read_reliably(path, lambda: read_bytes(path), _is_complete)
    except FileNotFoundError:
        return None
    if _is_complete(content):
        values: np.ndarray = np.load(io.BytesIO(content))
        if values.shape == (documents,) and values.dtype == np.float32:
            return values
    log.warning(f"{path} is corrupt: it is not as it was written; its values are computed again and replace it")
    return None


def _is_complete(content: bytes) -> bool:
    values, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:]
    return hashlib.sha256(values).digest() == checksum
