"""Loading a `TrainState` from a checkpoint onto the shardings of this run."""

from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.checkpoint.checkpointer import load_arrays, with_shardings
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.train.state import TrainState


def restore_state(checkpoint: Checkpoint, abstract: Any, shardings: Any) -> TrainState:
    """The state as it was saved; `abstract` and `shardings` are trees of the same structure."""
    params = load_arrays(checkpoint, "params", with_shardings(abstract.params, shardings.params))
    optimizer = load_arrays(checkpoint, "optimizer", with_shardings(abstract.optimizer, shardings.optimizer))
    step = jax.device_put(jnp.int32(checkpoint.step), shardings.step)
    return TrainState(step, params, optimizer)
