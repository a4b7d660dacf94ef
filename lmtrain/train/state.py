"""What training changes: parameters, optimizer state, and the number of updates done."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from lmtrain.models.interface import LanguageModel
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import like_parameters, parameter_shardings


class TrainState(struct.PyTreeNode):
    """`step` int32 scalar; `params` and `optimizer` trees of arrays."""

    step: Any
    params: Any
    optimizer: Any


@functools.lru_cache(maxsize=8)
def abstract_params(model: LanguageModel) -> Any:
    """Shapes, types and logical names of the parameters, without computing any."""
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    return jax.eval_shape(without_kernels(model).init, jax.random.key(0), tokens)["params"]


def without_kernels(model: LanguageModel) -> LanguageModel:
    """The same model with plain attention, for a few tokens in float32, which not every backend takes."""
    return model.clone(attention="xla")


def count_parameters(model: LanguageModel) -> int:
    """Scalars in the parameters, without those that pad the vocabulary."""
    boxes = jax.tree.leaves(abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    return sum(
        math.prod(
            model.vocab_size if name == "vocab" else size for name, size in zip(box.names, box.value.shape, strict=True)
        )
        for box in boxes
    )


def state_shardings(
    model: LanguageModel, optimizer: optax.GradientTransformation, layout: Layout, dtype: str
) -> tuple[Any, Any]:
    """The abstract `TrainState` of a model with parameters in `dtype`, and the sharding of each of its leaves."""
    boxed = abstract_params(model)
    params = with_dtype(nn.meta.unbox(boxed), dtype)
    shardings = parameter_shardings(layout, boxed)
    moments = jax.eval_shape(optimizer.init, params)
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, moments)
    return state, TrainState(layout.replicated, shardings, like_parameters(layout, moments, params, shardings))


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    shardings: Any,
    *,
    seed: int,
    dtype: str,
) -> TrainState:
    """A fresh state, each array computed where it lives. The same seed gives the same values on any mesh."""

    def init(key: jax.Array) -> TrainState:
        boxed = without_kernels(model).init(key, jnp.zeros((1, 2), jnp.int32))["params"]
        params = jax.tree.map(lambda p: p.astype(dtype), nn.meta.unbox(boxed))
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    with layout.active():
        return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def with_dtype(abstract: Any, dtype: str) -> Any:
    """The same shapes in another type."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), abstract)
