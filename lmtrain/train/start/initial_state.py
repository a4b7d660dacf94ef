"""Where a run's state comes from. The first of these that applies:

1. the newest checkpoint of the run itself that is whole, else the newest in `load_checkpoint_path`: it goes on after
   it. With `load_checkpoint: true` an error if there is none; with `false` if there is one of the run itself.
2. `initialize_from`: the whole state of another run, and its step.
3. `initialize_from_checkpoint_path`: parameters, their average and the optimizer's moments of another run, at step 0.
4. `initialize_from_hf`: parameters of a Hugging Face model.
5. fresh values.

A run that goes on ignores 2 to 4, and says so.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.differences import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.optim.optimizer import restart_schedule
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.processes import ALONE, Processes
from lmtrain.train.program.program import Program
from lmtrain.train.start.restore import restore_state
from lmtrain.train.start.resume import check_same_run
from lmtrain.train.step.state import TrainState

_OF_NO_USE = "ignored, as this run has checkpoints and resumes from them; to roll back, move later step-N folders away"

# Of a checkpoint's identity what the state of another run must share.
_SAME_STATE = ("model", "optimizer", "tokenizer")


def own_checkpoint(config: RunConfig, checkpointer: Checkpointer, processes: Processes = ALONE) -> Checkpoint | None:
    """The checkpoint that the run goes on from, verified; None if it begins.

    Raises `UserError` if there has to be one, and if there are some but none may be used.
    """
    trainer = config.trainer
    own = checkpointer.newest()
    if trainer.load_checkpoint is False:
        if own is not None:
            raise UserError(
                f"trainer.load_checkpoint is false, but this run has {own.path}, and would save among the checkpoints "
                "there; set it to null to resume, or start a new run with another --trainer.id"
            )
        return None
    if own is not None:  # once the run has saved something itself, that is where it goes on
        if trainer.load_checkpoint_path is not None:
            log.info(f"trainer.load_checkpoint_path: {_OF_NO_USE}")
        return own
    if trainer.load_checkpoint_path is not None:
        try:
            return choose_checkpoint(trainer.load_checkpoint_path, trainer.checkpointer.verify_on_restore, processes)
        except UserError as error:
            raise UserError(f"trainer.load_checkpoint_path: {error}") from None
    if trainer.load_checkpoint:
        raise UserError(
            f"trainer.load_checkpoint: there is no complete checkpoint in {checkpointer.path}; set it to null to begin "
            "without one"
        )
    return None


def begin(
    program: Program,
    own: Checkpoint | None,
    run_info: Mapping[str, Any],
    begin_from_hf: str | None,
    processes: Processes = ALONE,
) -> tuple[TrainState, int]:
    """The state to train from, and how many updates it has behind it; `own` is the checkpoint the run goes on from.

    Raises `UserError` for one that does not fit.
    """
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
        for name in [name for name, value in settings.items() if value is not None]:
            log.info(f"{name}: {_OF_NO_USE}")
        log.info(f"resuming after step {own.step:,} from {own.path}")
        return _restore(program, own, partial), own.step
    if trainer.initialize_from is not None:
        checkpoint = _other_run("trainer.initialize_from", trainer.initialize_from, run_info, program, processes)
        if checkpoint.step >= trainer.num_train_steps:
            raise UserError(
                f"trainer.initialize_from: {checkpoint.path} has {checkpoint.step:,} steps behind it, and "
                f"trainer.num_train_steps is {trainer.num_train_steps:,}"
            )
        log.info(f"beginning with the state of {checkpoint.path}, after its step {checkpoint.step:,}")
        return _restore(program, checkpoint, partial), checkpoint.step
    if config.initialize_from_checkpoint_path is not None:
        path = config.initialize_from_checkpoint_path
        checkpoint = _other_run("initialize_from_checkpoint_path", path, run_info, program, processes)
        log.info(f"beginning with parameters and moments of {checkpoint.path}, at step 0")
        state = _restore(program, checkpoint, partial)
        first = jax.device_put(jnp.int32(0), program.shardings.step)
        return state.replace(step=first, opt_state=restart_schedule(state.opt_state)), 0
    with program.explaining_errors():
        state = program.init()
    if begin_from_hf is not None:
        from lmtrain.train.start.hf_params import load_hf_params

        params = load_hf_params(begin_from_hf, config.model, program.model, program.layout, trainer.precision.params)
        ema_params = trainer.model_averaging and jax.tree.map(jnp.copy, params)
        state = state.replace(params=params, ema_params=ema_params)
        log.info(f"beginning with the weights of {begin_from_hf}")
    return state, 0


def _restore(program: Program, checkpoint: Checkpoint, partial: bool) -> TrainState:
    with program.explaining_errors():
        fresh = program.init if partial else None
        settings = program.config.trainer.checkpointer
        try:
            return restore_state(checkpoint, program.abstract, program.shardings, fresh, settings.staging_dir)
        except UserError:
            raise
        except (ValueError, KeyError, OSError) as error:  # what Orbax raises for files it cannot make sense of
            raise UserError(
                f"{checkpoint.path} cannot be read: {str(error).splitlines()[0]}; `lmtrain checkpoint verify` says "
                "whether it is corrupt, and trainer.checkpointer.verify_on_restore: full sets damaged ones aside"
            ) from error


def _other_run(
    setting: str, path: str, run_info: Mapping[str, Any], program: Program, processes: Processes
) -> Checkpoint:
    """The newest checkpoint at `path`. Raises `UserError` if its state is not of this model and optimizer."""
    trainer = program.config.trainer
    try:
        checkpoint = choose_checkpoint(path, trainer.checkpointer.verify_on_restore, processes)
    except UserError as error:
        raise UserError(f"{setting}: {error}") from None
    saved, ours = (
        {name: info["identity"][name] for name in _SAME_STATE} for info in (checkpoint.read_run_info(), run_info)
    )
    if trainer.allow_partial_checkpoint:  # then what differs shows in the arrays
        saved, ours = ({name: part[name] for name in ("tokenizer",)} for part in (saved, ours))
    differences = describe_differences(saved, ours, "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(f"{setting}: {checkpoint.path} does not fit\n{report}")
    return checkpoint
