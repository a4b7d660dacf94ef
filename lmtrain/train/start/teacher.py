"""The parameters of the frozen teacher of a distillation, which every start reads again."""

from collections.abc import Mapping
from typing import Any

from lmtrain.config.differences import require_equal
from lmtrain.config.errors import UserError, errors_of
from lmtrain.lora.fingerprint import fingerprint
from lmtrain.runtime.logging import log
from lmtrain.train.program.program import Program
from lmtrain.weights.load_hf import load_hf_params

# Key of a checkpoint's run info: the teacher and the fingerprint of its parameters.
TEACHER = "teacher"


def load_teacher(program: Program, saved: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """The teacher on its devices, in the dtype of the computation; and its description for checkpoints.

    `saved` is that of the checkpoint that the run resumes from. Raises `UserError` if the teacher has changed: its
    parameters, or what its config.json makes of them.
    """
    teacher = program.teacher
    assert teacher is not None
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
    return params, {"ref": teacher.ref, "fingerprint": digest, "dtype": dtype, "model": computation}
