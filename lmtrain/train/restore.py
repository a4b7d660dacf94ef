"""Loading training state, or only the parameters, from a checkpoint onto the devices of this run."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lmtrain.checkpoint.checkpointer import load_arrays, with_shardings
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.models.interface import LanguageModel
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.train.precision import parse_precision
from lmtrain.train.state import TrainState, abstract_params, with_dtype


def restore_state(checkpoint: Checkpoint, abstract: Any, shardings: Any) -> TrainState:
    """The state as it was saved; `abstract` and `shardings` are trees of the same structure."""
    where = shardings.parts
    parts = {
        name: load_arrays(checkpoint, name, with_shardings(part, where[name])) for name, part in abstract.parts.items()
    }
    return TrainState(step=jax.device_put(jnp.int32(checkpoint.step), shardings.step), **parts)


def restore_params(checkpoint: Checkpoint, model: LanguageModel, layout: Layout) -> Any:
    """The parameters alone, in the type they were saved in: all that sampling, evaluation and export need.

    Of a run with `model_averaging` their average.
    """
    boxed = abstract_params(model)
    trainer = checkpoint.read_run_info()["config"]["trainer"]
    part = "params"
    if trainer.get("model_averaging") is not None:
        part = "average"
        log.info(f"{checkpoint.path}: taking the average of the parameters (trainer.model_averaging)")
    abstract = with_dtype(nn.meta.unbox(boxed), parse_precision(trainer["mp"]).params)
    return load_arrays(checkpoint, part, with_shardings(abstract, parameter_shardings(layout, boxed)))
