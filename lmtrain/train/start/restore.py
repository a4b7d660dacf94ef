"""Loading the training state from a checkpoint onto the devices of this run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lmtrain.checkpoint.arrays import load_arrays, load_some_arrays, stored_arrays, with_shardings
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.checkpoint.staging import local_copy
from lmtrain.config.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.train.step.ema import new_average
from lmtrain.train.step.state import TrainState

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
