"""The initial state of a run. The first of these that applies:

1. The newest intact checkpoint of the run itself, else the newest in `load_checkpoint_path`: the run resumes from it.
   With `load_checkpoint: true`, none is an error; with `false`, a checkpoint of the run itself is an error.
2. `initialize_from`: the complete state of another run, including its step.
3. `initialize_from_checkpoint_path`: parameters, their average and the optimizer's moments of another run, at step 0.
4. `initialize_from_hf`: parameters of a Hugging Face model.
5. Newly initialized values.

A run that resumes ignores 2 to 4 and logs that. With LoRA, 3 and 4 name the frozen base, which every start reads again;
its adapters are newly initialized, or those of `lora.initialize_from`.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.checkpoint.arrays import load_arrays, load_some_arrays, stored_arrays, with_shardings
from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.checkpoint.staging import local_copy
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.tree import require_equal
from lmtrain.lora.model import AdaptedModel
from lmtrain.optim.optimizer import restart_schedule
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.train.program.program import Program
from lmtrain.train.start.resume import check_same_run
from lmtrain.train.step.state import TrainState, new_average
from lmtrain.weights.lora_base import LoraBase

_MAX_LISTED = 5


def restore_state(
    checkpoint: Checkpoint,
    abstract: TrainState,
    shardings: TrainState,
    fresh: Callable[[], TrainState] | None = None,
    staging_dir: str | None = None,
) -> TrainState:
    """The state of a checkpoint; `abstract` and `shardings` are trees of the same structure.

    Arrays that are missing from the checkpoint come from `fresh`, and are logged. Raises `UserError` naming them if
    that is None, and for arrays of another shape.
    """
    step = jax.device_put(jnp.int32(checkpoint.step), shardings.step)
    with local_copy(checkpoint, list(abstract.parts), staging_dir) as path:
        copies = abstract.ema_params is not None and not stored_arrays(path, "average")
        if copies:
            log.info(f"{checkpoint.path}: no EMA in the checkpoint, initialized from the parameters")
            abstract = abstract.replace(ema_params=None)
        missing = _missing(checkpoint, path, abstract)
        if missing and fresh is None:
            raise UserError(
                f"{checkpoint.path}: missing from the checkpoint: {_listed(missing)}; set "
                "trainer.allow_partial_checkpoint: true to initialize them as in a new run"
            )
        wanted = {name: with_shardings(part, shardings.parts[name]) for name, part in abstract.parts.items()}
        if missing and fresh is not None:
            log.warning(f"{checkpoint.path}: missing from the checkpoint, newly initialized: {_listed(missing)}")
            initial = fresh().parts
            parts = {name: load_some_arrays(path, name, part, initial[name]) for name, part in wanted.items()}
        else:
            parts = {name: load_arrays(path, name, part) for name, part in wanted.items()}
    if copies:
        parts["average"] = new_average(parts["params"])
    return TrainState.from_parts(step, parts)


def _missing(checkpoint: Checkpoint, path: str, abstract: TrainState) -> list[str]:
    """Names of arrays missing from the checkpoint, read at `path`; logs the parts that are converted to float32. Raises
    `UserError` for arrays of another shape."""
    missing, converted = [], {}
    for part, tree in abstract.parts.items():
        stored = stored_arrays(path, part)
        for where, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(where, simple=True, separator="/")
            if name not in stored:
                missing.append(f"{part}/{name}")
            elif stored[name].shape != leaf.shape:
                raise UserError(
                    f"{checkpoint.path}: {part}/{name} is {list(stored[name].shape)}, expected {list(leaf.shape)}"
                )
            elif leaf.dtype == jnp.float32 != stored[name].dtype:
                converted[part] = str(stored[name].dtype)
    if converted:
        parts = ", ".join(f"{part} ({kind})" for part, kind in converted.items())
        log.info(f"{checkpoint.path}: converted to float32: {parts}")
    return missing


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


_IGNORED = "ignored, as this run has checkpoints and resumes from them; to roll back, move later step-N folders away"

# Parts of a checkpoint's identity that have to match to use the state of another run.
_SAME_STATE = ("model", "optimizer", "tokenizer", "lora")


def own_checkpoint(config: RunConfig, checkpointer: Checkpointer, processes: Processes = ALONE) -> Checkpoint | None:
    """The checkpoint that the run resumes from, verified; None for a new run.

    Raises `UserError` if one is required but missing, or if one exists but must not be used.
    """
    trainer = config.trainer
    own = checkpointer.newest()
    if trainer.load_checkpoint is False:
        if own is not None:
            raise UserError(
                f"trainer.load_checkpoint is false, but this run has {own.path} and would save its checkpoints "
                "there too; set it to null to resume, or start a new run with another --trainer.id"
            )
        return None
    if own is not None:  # once the run has saved a checkpoint, it resumes from that
        if trainer.load_checkpoint_path is not None:
            log.info(f"trainer.load_checkpoint_path: {_IGNORED}")
        return own
    if trainer.load_checkpoint_path is not None:
        with errors_of("trainer.load_checkpoint_path"):
            return choose_checkpoint(trainer.load_checkpoint_path, trainer.checkpointer.verify_on_restore, processes)
    if trainer.load_checkpoint:
        raise UserError(
            f"trainer.load_checkpoint: no complete checkpoint in {checkpointer.path}; set it to null for a new run"
        )
    return None


def begin(
    program: Program,
    own: Checkpoint | None,
    run_info: Mapping[str, Any],
    begin_from_hf: str | None,
    processes: Processes = ALONE,
    base: LoraBase | None = None,
    teacher: Any = None,
) -> tuple[TrainState, int]:
    """The state to train from, and its number of finished updates; `own` is the checkpoint the run resumes from.

    `base` is the frozen base of a run with LoRA, `teacher` has the parameters of the teacher of a distillation.

    Raises `UserError` for a checkpoint that does not match the run.
    """
    state, step = _begin(program, own, run_info, begin_from_hf, processes, base, teacher)
    return state.replace(teacher=teacher), step


def _begin(
    program: Program,
    own: Checkpoint | None,
    run_info: Mapping[str, Any],
    begin_from_hf: str | None,
    processes: Processes,
    base: LoraBase | None,
    teacher: Any,
) -> tuple[TrainState, int]:
    config = program.config
    trainer = config.trainer
    partial = trainer.allow_partial_checkpoint
    settings = {
        "trainer.initialize_from": trainer.initialize_from,
        "initialize_from_checkpoint_path": config.initialize_from_checkpoint_path,
        "initialize_from_hf": begin_from_hf,
    }
    if own is not None:
        check_same_run(own, run_info)
        log.info(f"resuming after step {own.step:,} from {own.path} (to start a new run, set another trainer.id)")
        if base is not None:
            return _restore(program, own, partial, base.params), own.step
        for name in [name for name, value in settings.items() if value is not None]:
            log.info(f"{name}: {_IGNORED}")
        return _restore(program, own, partial), own.step
    if base is not None:
        return _new_adapters(program, base, teacher), 0
    if trainer.initialize_from is not None:
        checkpoint = _other_run("trainer.initialize_from", trainer.initialize_from, run_info, program, processes)
        if checkpoint.step >= trainer.num_train_steps:
            raise UserError(
                f"trainer.initialize_from: {checkpoint.path} is at step {checkpoint.step:,} already, but "
                f"trainer.num_train_steps is {trainer.num_train_steps:,}; increase it"
            )
        log.info(f"starting from the state of {checkpoint.path}, after its step {checkpoint.step:,}")
        return _restore(program, checkpoint, partial), checkpoint.step
    if config.initialize_from_checkpoint_path is not None:
        path = config.initialize_from_checkpoint_path
        checkpoint = _other_run("initialize_from_checkpoint_path", path, run_info, program, processes)
        log.info(f"starting from parameters and optimizer moments of {checkpoint.path}, at step 0")
        state = _restore(program, checkpoint, partial)
        first = jax.device_put(jnp.int32(0), program.shardings.step)
        return state.replace(step=first, opt_state=restart_schedule(state.opt_state)), 0
    with program.explaining_errors():
        state = program.init(teacher=teacher)
    if begin_from_hf is not None:
        from lmtrain.weights.load_hf import load_hf_params

        params = load_hf_params(begin_from_hf, config.model, program.model, program.layout, trainer.precision.params)
        ema_params = trainer.model_averaging and new_average(params)
        state = state.replace(params=params, ema_params=ema_params)
        log.info(f"starting from the weights of {begin_from_hf}")
    else:
        log.info(f"a new run: parameters are initialized from trainer.seed {trainer.seed}")
    return state, 0


def _new_adapters(program: Program, base: LoraBase, teacher: Any) -> TrainState:
    """The initial state of a run with LoRA."""
    with program.explaining_errors():
        state = program.init(base.params, teacher)
    lora = program.config.lora
    if lora is None or lora.initialize_from is None:
        log.info(f"a new run: adapters are initialized from trainer.seed {program.config.trainer.seed}")
        return state
    from lmtrain.weights.load_hf import check_base, load_peft_adapter

    assert isinstance(program.model, AdaptedModel)
    check_base(lora, base.identity)
    params = load_peft_adapter(program.config, program.model, program.layout, lora.initialize_from)
    log.info(f"starting from the adapters of {lora.initialize_from}")
    return state.replace(params=params, ema_params=state.ema_params and new_average(params))


def _restore(program: Program, checkpoint: Checkpoint, partial: bool, base: Any = None) -> TrainState:
    with program.explaining_errors():
        fresh = functools.partial(program.init, base) if partial else None
        settings = program.config.trainer.checkpointer
        try:
            state = restore_state(checkpoint, program.abstract, program.shardings, fresh, settings.staging_dir)
            return state.replace(base=base)
        except UserError:
            raise
        except (ValueError, KeyError, OSError) as error:  # raised by Orbax for invalid files
            raise UserError(
                f"{checkpoint.path} cannot be read: {str(error).splitlines()[0]}; `lmtrain checkpoint verify` checks "
                "whether it is corrupt, and trainer.checkpointer.verify_on_restore: full sets corrupt ones aside"
            ) from error


def _other_run(
    setting: str, path: str, run_info: Mapping[str, Any], program: Program, processes: Processes
) -> Checkpoint:
    """The newest checkpoint at `path`. Raises `UserError` if it is not of the same model and optimizer."""
    trainer = program.config.trainer
    with errors_of(setting):
        checkpoint = choose_checkpoint(path, trainer.checkpointer.verify_on_restore, processes)
        # with allow_partial_checkpoint, the shapes of the arrays are checked instead
        names = ("tokenizer",) if trainer.allow_partial_checkpoint else _SAME_STATE
        saved, ours = (
            {name: info["identity"].get(name) for name in names} for info in (checkpoint.read_run_info(), run_info)
        )
        require_equal(saved, ours, f"{checkpoint.path} does not match this run")
    return checkpoint
