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
from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import BASE, AdaptedModel
from lmtrain.optim.optimizer import restart_schedule
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError, errors_of
from lmtrain.runtime.logging import ALONE, Processes, log
from lmtrain.train.program.program import Program
from lmtrain.train.start.resume import check_same_run
from lmtrain.train.step.state import TrainState, new_average
from lmtrain.weights.lora_base import LoadedModel

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
    frozen: Mapping[str, LoadedModel] | None = None,
) -> tuple[TrainState, int]:
    """The state to train from, and its number of finished updates; `own` is the checkpoint the run resumes from, and
    `frozen` are the models that are not trained, by name.

    Raises `UserError` for a checkpoint that does not match the run.
    """
    config, models = program.config, frozen or {}
    given = {name: each.params for name, each in models.items()}
    step = 0
    if own is not None:
        state, step = _resumed(program, own, run_info, begin_from_hf, given), own.step
    elif config.lora is not None:
        state = _new_adapters(program, config.lora, models[BASE], given)
    elif config.trainer.initialize_from is not None:
        state, step = _of_other_run(program, config.trainer.initialize_from, run_info, processes, given)
    elif config.initialize_from_checkpoint_path is not None:
        state = _of_checkpoint(program, config.initialize_from_checkpoint_path, run_info, processes, given)
    else:
        state = _new(program, given)
        if begin_from_hf is not None:
            state = _with_weights_of(begin_from_hf, program, state)
        else:
            log.info(f"a new run: parameters are initialized from trainer.seed {config.trainer.seed}")
    return state.replace(frozen=given), step


def _resumed(
    program: Program, own: Checkpoint, run_info: Mapping[str, Any], begin_from_hf: str | None, given: Mapping[str, Any]
) -> TrainState:
    config = program.config
    check_same_run(own, run_info)
    log.info(f"resuming after step {own.step:,} from {own.path} (to start a new run, set another trainer.id)")
    settings = {
        "trainer.initialize_from": config.trainer.initialize_from,
        "initialize_from_checkpoint_path": config.initialize_from_checkpoint_path,
        "initialize_from_hf": begin_from_hf,
    }
    for name, value in settings.items():
        if value is not None and config.lora is None:
            log.info(f"{name}: {_IGNORED}")
    return _restore(program, own, given)


def _new_adapters(program: Program, lora: LoraConfig, base: LoadedModel, given: Mapping[str, Any]) -> TrainState:
    state = _new(program, given)
    if lora.initialize_from is None:
        log.info(f"a new run: adapters are initialized from trainer.seed {program.config.trainer.seed}")
        return state
    from lmtrain.weights.load_hf import check_base, load_peft_adapter

    assert isinstance(program.model, AdaptedModel)
    check_base(lora, base.identity)
    params = load_peft_adapter(program.config, program.model, program.layout, lora.initialize_from)
    log.info(f"starting from the adapters of {lora.initialize_from}")
    return state.replace(params=params, ema_params=state.ema_params and new_average(params))


def _of_other_run(
    program: Program, path: str, run_info: Mapping[str, Any], processes: Processes, given: Mapping[str, Any]
) -> tuple[TrainState, int]:
    checkpoint = _other_run("trainer.initialize_from", path, run_info, program, processes)
    last = program.config.trainer.num_train_steps
    if checkpoint.step >= last:
        raise UserError(
            f"trainer.initialize_from: {checkpoint.path} is at step {checkpoint.step:,} already, but "
            f"trainer.num_train_steps is {last:,}; increase it"
        )
    log.info(f"starting from the state of {checkpoint.path}, after its step {checkpoint.step:,}")
    return _restore(program, checkpoint, given), checkpoint.step


def _of_checkpoint(
    program: Program, path: str, run_info: Mapping[str, Any], processes: Processes, given: Mapping[str, Any]
) -> TrainState:
    checkpoint = _other_run("initialize_from_checkpoint_path", path, run_info, program, processes)
    log.info(f"starting from parameters and optimizer moments of {checkpoint.path}, at step 0")
    state = _restore(program, checkpoint, given)
    first = jax.device_put(jnp.int32(0), program.shardings.step)
    return state.replace(step=first, opt_state=restart_schedule(state.opt_state))


def _with_weights_of(ref: str, program: Program, state: TrainState) -> TrainState:
    from lmtrain.weights.load_hf import load_hf_params

    config = program.config
    params = load_hf_params(ref, config.model, program.model, program.layout, config.trainer.precision.params)
    log.info(f"starting from the weights of {ref}")
    return state.replace(params=params, ema_params=state.ema_params and new_average(params))


def _new(program: Program, given: Mapping[str, Any]) -> TrainState:
    with program.explaining_errors():
        return program.init(given)


def _restore(program: Program, checkpoint: Checkpoint, given: Mapping[str, Any]) -> TrainState:
    trainer = program.config.trainer
    with program.explaining_errors():
        fresh = functools.partial(program.init, given) if trainer.allow_partial_checkpoint else None
        try:
            return restore_state(
                checkpoint, program.abstract, program.shardings, fresh, trainer.checkpointer.staging_dir
            )
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
