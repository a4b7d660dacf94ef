"""Values of the tensors of an export, one at a time on the host, from parameters on any devices and processes."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from lmtrain.hf.key_map import Piece, take
from lmtrain.lora.adapters import adapted_layers, merge_layer, trained_in_full
from lmtrain.lora.model import ADAPTERS, BASE, AdaptedModel
from lmtrain.lora.sites import A, B
from lmtrain.models.params import flatten
from lmtrain.sharding.mesh import Layout


def gather_tensors(params: Any, pieces: Sequence[Piece], layout: Layout, vocab_size: int) -> Iterator[np.ndarray]:
    """The values of the pieces, one after the other; all processes of a run have to iterate over all of them."""
    read = _reader(params, layout)
    return (take(piece, read, vocab_size) for piece in pieces)


def gather_merged(params: Any, model: AdaptedModel, pieces: Sequence[Piece], layout: Layout) -> Iterator[np.ndarray]:
    """The tensors of the base with the adapters merged in float32; all processes have to iterate over all of them."""
    adapted = {f"{path}/kernel": path for path in adapted_layers(flatten(params[ADAPTERS]))}
    full = set(trained_in_full(flatten(params[ADAPTERS])))
    of_base, of_adapters = _reader(params[BASE], layout), _reader(params[ADAPTERS], layout)

    def read(path: str, index: tuple[int, ...]) -> np.ndarray:
        values = (of_adapters if path in full else of_base)(path, index)
        if path not in adapted:
            return values
        a, b = (of_adapters(f"{adapted[path]}/{name}", index) for name in (A, B))
        return merge_layer(values, a, b, model.scale)

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
