"""Parameters on the devices: new ones, those of a checkpoint; and the tensors of an export, gathered from them."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding

from lmtrain.checkpoint.arrays import load_arrays, with_shardings
from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.checkpoint.staging import local_copy
from lmtrain.hf.key_map import Piece, take
from lmtrain.lora.model import (
    ADAPTERS,
    BASE,
    AdaptedModel,
    merge_layer,
    start_from,
    trainable,
    trained_in_full,
)
from lmtrain.lora.sites import A, B
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, flatten, initializer, with_dtype
from lmtrain.run.execution import parse_precision
from lmtrain.runtime.logging import log
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import parameter_shardings


def new_params(model: LanguageModel, key: jax.Array, abstract: Any, base: Any = None) -> Any:
    """New trained parameters in the dtypes of `abstract`; with LoRA, adapters of the frozen `base`.

    Compile the call: it computes all values.
    """
    params = nn.meta.unbox(initializer(model)(key))
    if isinstance(model, AdaptedModel):
        params = start_from(params[ADAPTERS], base)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)


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


def gather_tensors(params: Any, pieces: Sequence[Piece], layout: Layout, vocab_size: int) -> Iterator[np.ndarray]:
    """The values of the pieces, one after the other; all processes of a run have to iterate over all of them."""
    read = _reader(params, layout)
    return (take(piece, read, vocab_size) for piece in pieces)


def gather_merged(params: Any, model: AdaptedModel, pieces: Sequence[Piece], layout: Layout) -> Iterator[np.ndarray]:
    """The tensors of the base with the adapters merged in float32; all processes have to iterate over all of them."""
    adapted = {f"{path}/kernel": (site, n) for site in model.sites for n, path in enumerate(site.paths)}
    full = set(trained_in_full(flatten(params[ADAPTERS])))
    of_base, of_adapters = _reader(params[BASE], layout), _reader(params[ADAPTERS], layout)

    def read(path: str, index: tuple[int, ...]) -> np.ndarray:
        values = (of_adapters if path in full else of_base)(path, index)
        if path not in adapted:
            return values
        site, number = adapted[path]
        a, b = (of_adapters(f"{site.path}/{name}", index) for name in (A, B))
        return merge_layer(values, a, site.of_part(number, b), model.scale)

    return (take(piece, read, model.vocab_size) for piece in pieces)


def _reader(params: Any, layout: Layout) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    """(path, index) -> the parameter on the host, or the part at this index of its first dimensions."""
    flat = flatten(params)
    part = _gatherer(layout.replicated)
    return lambda path, index: np.asarray(part(flat[path], index))


@functools.cache
def _gatherer(replicated: NamedSharding) -> Any:
    """Gather the part of an array at an index of its first dimensions on every device; compiled once per shape."""

    def part(array: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for number in index:
            array = jax.lax.dynamic_index_in_dim(array, number, keepdims=False)
        return array

    return jax.jit(part, out_shardings=replicated)
