"""Models of a run that are not trained: the base of adapters, the teacher, and the reference of preference tuning."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lmtrain.config.tree import require_equal
from lmtrain.data.caches import Caches
from lmtrain.evaluation.interface import Context
from lmtrain.lora.model import BASE, AdaptedModel, fingerprint
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.runtime.logging import Processes, log
from lmtrain.train.program.parts import Teacher
from lmtrain.train.program.program import Program
from lmtrain.train.start.train_batches import TrainBatches
from lmtrain.train.step.state import TEACHER
from lmtrain.weights.export_folder import BaseIdentity
from lmtrain.weights.hf_config import hf_ref
from lmtrain.weights.load_hf import load_hf_params
from lmtrain.weights.lora_base import LoadedModel, load_base
from lmtrain.weights.reference import Reference
from lmtrain.weights.trained_model import REFERENCE, load_initial


def reference_of(program: Program, digest: str, load: Callable[[], Any], processes: Processes) -> Reference:
    """The reference of a run, by the digest of its parameters, those of the model without adapters."""
    model = program.model.inner if isinstance(program.model, AdaptedModel) else program.model
    return Reference(
        config=program.config,
        model=model,
        layout=program.layout,
        digest=digest,
        load=load,
        xla_options=program.xla_options,
        processes=processes,
    )


def reference_before_state(
    program: Program, frozen: Mapping[str, LoadedModel], saved: Mapping[str, Any], processes: Processes
) -> Reference | None:
    """The reference that exists before the state takes the memory: the frozen base, or the model that a run that
    resumes started from; None for a new run, whose initial state it is."""
    if base := frozen.get(BASE):
        return reference_of(program, base.identity.fingerprint, lambda: base.params, processes)
    if not saved:
        return None
    load = partial(load_initial, program.config, program.model, program.layout, processes)
    return reference_of(program, saved[REFERENCE], load, processes).checked()


def add_reference(reference: Reference, caches: Caches, batches: TrainBatches, evaluation: Context) -> Context:
    """Add the log-probabilities of all answers to the training batches, and to the validation sets of the result.

    Raises `UserError` if the reference has changed.
    """
    try:
        in_order = [batches.in_order(cache, evaluation.batch_size) for cache in caches.train.values()]
        values = [reference.log_probs(cache, own) for cache, own in zip(caches.train.values(), in_order, strict=True)]
        batches.set_references(values)
        return reference.add_to(caches.validation, evaluation)
    finally:
        reference.forget()


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
        found[BASE] = load_base(config, model, layout, ref, tokenizer, saved.get(BASE), processes, program.store)
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
