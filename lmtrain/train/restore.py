"""Loading training state, or only the parameters, from a checkpoint onto the devices of this run."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.checkpoint.checkpointer import load_arrays, with_shardings
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.models.interface import LanguageModel
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.train.precision import parse_precision
from lmtrain.train.state import TrainState, abstract_params, with_dtype


def restore_state(checkpoint: Checkpoint, abstract: Any, shardings: Any) -> TrainState:
    """The state as it was saved; `abstract` and `shardings` are trees of the same structure."""
    params = load_arrays(checkpoint, "params", with_shardings(abstract.params, shardings.params))
    optimizer = load_arrays(checkpoint, "optimizer", with_shardings(abstract.optimizer, shardings.optimizer))
    step = jax.device_put(jnp.int32(checkpoint.step), shardings.step)
    return TrainState(step, params, optimizer)


def restore_params(checkpoint: Checkpoint, model: LanguageModel, layout: Layout) -> Any:
    """The parameters alone, in the type they were saved in: all that sampling, evaluation and export need."""
    boxed = abstract_params(model)
    dtype = parse_precision(checkpoint.read_run_info()["config"]["trainer"]["mp"]).params
    abstract = with_dtype(nn.meta.unbox(boxed), dtype)
    return load_arrays(checkpoint, "params", with_shardings(abstract, parameter_shardings(layout, boxed)))
