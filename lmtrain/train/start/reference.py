"""Models that are not trained: the base of adapters, the teacher, and the reference of preference tuning, which is the
model that training starts from.

Log-probabilities of answers by the reference are computed on the run's devices before the first step, and stored next
to each token cache under a hash of the reference's parameters and of all else that determines them, followed by its
checksum. With LoRA the reference is the frozen base.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.tree import require_equal
from lmtrain.data.batches import EvalSource
from lmtrain.data.caches import Cache, Caches
from lmtrain.data.windows import PairWindows
from lmtrain.evaluation.eval_step import build_forward_step, read_ahead
from lmtrain.evaluation.interface import Context, ValidationSet
from lmtrain.lora.model import BASE, AdaptedModel, fingerprint
from lmtrain.objectives.preferences import answer_log_probs
from lmtrain.run.config import RunConfig
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.errors import UserError, counted, errors_of
from lmtrain.runtime.logging import Processes, log
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
from lmtrain.sharding.mesh import MeshFunction
from lmtrain.train.program.parts import Teacher
from lmtrain.train.program.program import Program
from lmtrain.train.start.train_batches import TrainBatches
from lmtrain.train.step.state import TEACHER
from lmtrain.weights.export_folder import BaseIdentity
from lmtrain.weights.hf_config import hf_ref
from lmtrain.weights.load_checkpoint import restore_params
from lmtrain.weights.load_hf import load_hf_params
from lmtrain.weights.lora_base import LoadedModel, load_base

# Key of a checkpoint's run info: the fingerprint of the reference's parameters.
REFERENCE = "reference"

# Part of the hash that names stored values: changes if the same inputs give other values.
_VERSION = 2

_CHECKSUM_BYTES = 32


class Reference:
    """The reference of a run, by the `digest` of its parameters. `load` gives these, and is called only if some values
    are not stored yet."""

    def __init__(self, program: Program, digest: str, load: Callable[[], Any], processes: Processes):
        self.digest = digest
        self._program = program
        self._load = load
        self._processes = processes
        self._params: Any = None

    @classmethod
    def of(cls, program: Program, params: Any, processes: Processes) -> "Reference":
        """The reference with these parameters of the model, without adapters."""
        return cls(program, fingerprint(params, program.layout), lambda: params, processes)

    @classmethod
    def before_state(
        cls, program: Program, frozen: Mapping[str, LoadedModel], saved: Mapping[str, Any], processes: Processes
    ) -> "Reference | None":
        """The reference that exists before the state takes the memory: the frozen base, or the model that a run that
        resumes started from; None for a new run, whose initial state it is."""
        if base := frozen.get(BASE):
            return cls(program, base.identity.fingerprint, lambda: base.params, processes)
        return cls.saved(program, saved[REFERENCE], processes) if saved else None

    @classmethod
    def saved(cls, program: Program, digest: str, processes: Processes) -> "Reference":
        """The reference of a run that resumes."""

        def load() -> Any:
            params = _initial_params(program, processes)
            found = fingerprint(params, program.layout)
            if found != digest:
                raise UserError(
                    f"the model that this run started from has changed: it has the fingerprint {found[:12]}, but the "
                    f"run's reference {digest[:12]}; restore it, or start a new run with another trainer.id"
                )
            return params

        return cls(program, digest, load, processes)

    def add_to(self, caches: Caches, batches: TrainBatches, evaluation: Context) -> Context:
        """Add the log-probabilities of all answers to the training batches, and to the validation sets of the result.

        Raises `UserError` if the reference has changed.
        """
        try:
            batches.set_references(
                [
                    self._log_probs(cache, batches.in_order(cache, evaluation.batch_size))
                    for cache in caches.train.values()
                ]
            )
            sets = {}
            for name, own in evaluation.sets.items():
                values = self._log_probs(caches.validation[name], own)
                sets[name] = replace(own, source=replace(own.source, reference=values))
            return replace(evaluation, sets=sets)
        finally:
            self._params = None  # of a run that resumes, this is a second copy

    def _log_probs(self, cache: Cache, own: ValidationSet) -> np.ndarray:
        """The log-probability of each document in the batches of a cache, float32 [documents]; 0 in others."""
        path = join(cache.folder, f"reference-{key_of(self.digest, self._program.config, cache, own.source)}.npy")
        assert isinstance(own.source.windows, PairWindows)
        own.source.windows.for_evaluation()
        if self._processes.is_first and not is_url(cache.folder):
            remove_temporaries(cache.folder, "reference-", UNUSED_SECONDS)
        stored = read_values(path, own.source.windows.documents)
        if all(gather(self._processes, "reference is stored", stored is not None)):
            assert stored is not None
            log.info(f"reference {self.digest[:12]}: {path}")
            return stored
        values = self._compute(own, cache.folder)
        if self._processes.is_first:
            try:
                write_values(path, values)
            except (OSError, UserError) as error:
                log.warning(f"{path} cannot be written, so the next start computes its values again: {error}")
        return values

    def _compute(self, own: ValidationSet, folder: str) -> np.ndarray:
        windows, size = own.source.windows, own.source.batch_size
        assert isinstance(windows, PairWindows)
        if self._params is None:
            self._params = self._load()
        values = np.zeros(windows.documents, np.float32)
        pairs = counted(windows.documents // 2, "pair")
        log.info(f"reference {self.digest[:12]}: log-probabilities of {pairs} of {folder}, {len(own):,} batches")
        step = _build_step(self._program)
        with Progress("reference", len(own), quiet=not self._processes.is_first) as progress:
            for number, sums in enumerate(read_ahead(step, self._params, own)):
                for row, of_documents in enumerate(np.asarray(sums)):
                    documents = windows.documents_of(number * size + row)
                    values[documents] = of_documents[: len(documents)]
                progress.update(number + 1, f"{number + 1:,}/{len(own):,} batches of {folder}")
        return values


def _build_step(program: Program) -> MeshFunction:
    """The jitted (params, batch) -> log-probabilities of documents, see `answer_log_probs`, on every device."""
    model = program.model.inner if isinstance(program.model, AdaptedModel) else program.model

    compute = program.config.trainer.precision.compute
    return build_forward_step(model, program.layout, compute, answer_log_probs, program.xla_options)


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


def _initial_params(program: Program, processes: Processes) -> Any:
    """The parameters that the run started from."""
    config = program.config
    ref, path = hf_ref(config), config.initialize_from_checkpoint_path
    if ref is not None:
        dtype = config.trainer.precision.params
        return load_hf_params(ref, config.model, program.model, program.layout, dtype)
    assert path is not None
    settings = config.trainer.checkpointer
    with errors_of("initialize_from_checkpoint_path"):
        checkpoint = choose_checkpoint(path, settings.verify_on_restore, processes, parts=("params",))
        return restore_params(checkpoint, program.model, program.layout, settings.staging_dir, averaged=False)


def load_frozen(
    program: Program, tokenizer: Mapping[str, Any], saved: Mapping[str, Any], processes: Processes
) -> dict[str, LoadedModel]:
    """The models of a run that are not trained, on its devices, by their names in the state and in the run info.

    `tokenizer` is the identity of the run's tokenizer, `saved` the run info of the checkpoint that the run resumes
    from, empty for a new run. Raises `UserError` for a model that has changed.
    """
    found, config = {}, program.config
    if isinstance(program.model, AdaptedModel):
        model, layout, ref = program.model, program.layout, hf_ref(config)
        base = load_base(config, model, layout, ref, tokenizer, saved.get(BASE), processes)
        found[BASE] = base._replace(params=program.in_storage(base.params))
    if program.teacher is not None:
        found[TEACHER] = load_teacher(program, program.teacher, saved.get(TEACHER))
    return found


def load_teacher(program: Program, teacher: Teacher, saved: Mapping[str, Any] | None) -> LoadedModel:
    """The teacher in the dtype of the computation.

    `saved` is its run info in the checkpoint that the run resumes from. Raises `UserError` if the teacher has changed:
    its parameters, or what its config.json makes of them.
    """
    dtype = program.config.trainer.precision.compute
    with errors_of("objective.teacher"):
        params = load_hf_params(teacher.ref, teacher.config, teacher.model, program.layout, dtype)
        digest = fingerprint(params, program.layout)
        if saved is not None and saved["fingerprint"] != digest:
            raise UserError(
                f"{teacher.ref} has changed: it has the fingerprint {digest[:12]}, but this run was trained with "
                f"{saved['fingerprint'][:12]}; restore it, or start a new run with another trainer.id"
            )
        computation = teacher.config.computation()
        if saved is not None and "model" in saved:  # earlier versions did not save it
            advice = "restore it, or start a new run with another trainer.id"
            require_equal(saved["model"], computation, f"the config.json of {teacher.ref} has changed", advice)
    log.info(f"teacher: {teacher.ref}, {dtype}, frozen; fingerprint {digest[:12]}")
    described = {"ref": teacher.ref, "fingerprint": digest, "dtype": dtype, "model": computation}
    return LoadedModel(params, BaseIdentity(digest, dtype), described)
