"""Loading only the parameters from a checkpoint onto the devices: for sampling, evaluation, export and LoRA's base."""

from typing import Any

import flax.linen as nn

from lmtrain.checkpoint.arrays import load_arrays, with_shardings
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.checkpoint.staging import local_copy
from lmtrain.lora.model import trainable
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, with_dtype
from lmtrain.run.precision import parse_precision
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings


def restore_params(
    checkpoint: Checkpoint,
    model: LanguageModel,
    layout: Layout,
    staging_dir: str | None = None,
    averaged: bool = True,
) -> Any:
    """Only the parameters, in the dtype they were saved in: for sampling, evaluation and export.

    For a run with `model_averaging`, their average, in float32, if `averaged`. For one with LoRA, only the adapters.
    """
    trainer, part = checkpoint.read_run_info()["config"]["trainer"], "params"
    dtype = parse_precision(trainer["mp"]).params
    if averaged and trainer.get("model_averaging") is not None:
        part, dtype = "average", "float32"
        log.info(f"{checkpoint.path}: using the EMA of the parameters (trainer.model_averaging)")
    boxed = trainable(model, abstract_params(model))
    abstract = with_dtype(nn.meta.unbox(boxed), dtype)
    with local_copy(checkpoint, [part], staging_dir) as path:
        return load_arrays(path, part, with_shardings(abstract, parameter_shardings(layout, boxed)))
