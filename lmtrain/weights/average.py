"""Averages of checkpoints: which ones `--average` names, and the mean of their parameters.

The mean over the end of a run often has a lower loss than its last step (Izmailov et al. 2018, stochastic weight
averaging; Li et al. 2022, latest weight averaging).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoints
from lmtrain.checkpoint.policies import Kind
from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.config.errors import UserError
from lmtrain.runtime.storage import join

# Parts of a checkpoint that are read.
_PARTS = ("params", "average")


def named_checkpoints(average: str, folder: str, verification: str) -> list[Checkpoint]:
    """The checkpoints that `average` names, verified: a number N is the last N permanent ones in `folder`, a list has
    steps there or paths. The last one is that of most steps.

    Raises `UserError` if one is missing or corrupt.
    """
    names = [name.strip() for name in average.split(",")]
    if len(names) == 1:
        paths = [checkpoint.path for checkpoint in _last(average, folder)]
    else:
        paths = [join(folder, f"step-{name}") if name.isdigit() else name for name in names]
    checkpoints = [choose_checkpoint(path, verification, parts=_PARTS) for path in paths]
    if len({checkpoint.path for checkpoint in checkpoints}) < len(checkpoints):
        raise UserError(f"--average {average}: names a checkpoint twice")
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def _last(number: str, folder: str) -> list[Checkpoint]:
    if not re.fullmatch(r"[1-9]\d*", number) or int(number) < 2:
        raise UserError(f"--average {number}: expected a number of at least 2, or a list of steps or paths: A,B,C")
    found = [c for c in find_checkpoints(folder) if c.read_manifest().kind is Kind.PERMANENT]
    if len(found) < int(number):
        steps = ", ".join(str(checkpoint.step) for checkpoint in found) or "none"
        raise UserError(
            f"--average {number}: {folder} has {len(found)} permanent checkpoints (steps: {steps}); a run keeps those "
            "of trainer.checkpointer.keep"
        )
    return found[-int(number) :]


def mean_params(checkpoints: Sequence[Checkpoint], load: Callable[[Checkpoint], Any]) -> Any:
    """The mean of the parameters that `load` gives for each checkpoint, in their dtype, summed in float32."""
    import jax
    import jax.numpy as jnp

    first, *others = checkpoints
    params = load(first)
    if not others:
        return params
    dtypes = jax.tree.map(lambda value: value.dtype, params)
    add = jax.jit(lambda total, params: jax.tree.map(jnp.add, total, params), donate_argnums=0)
    total = jax.tree.map(lambda value: value.astype(jnp.float32), params)
    for checkpoint in others:
        total = add(total, load(checkpoint))
    return jax.tree.map(lambda value, dtype: (value / len(checkpoints)).astype(dtype), total, dtypes)
