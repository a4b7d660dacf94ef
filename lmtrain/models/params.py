"""The parameters of any model, as a tree: shapes, names of dimensions, counts, dtypes."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from lmtrain.models.attention.names import PLAIN
from lmtrain.models.interface import LanguageModel
from lmtrain.models.layers.quantized import EIGHT_BIT_TYPES
from lmtrain.models.moe.load import BIAS

# Name of the scale of a parameter that is stored in 8 bits, next to it.
STORED_SCALE = "kernel_scale"

# Beginnings of the names of modules whose parameters are not rounded for a computation in 16 bits.
_NOT_ROUNDED = ("norm_", "router")

# Between nested maps and maps from slash-separated paths.
flatten, unflatten = functools.partial(flatten_dict, sep="/"), functools.partial(unflatten_dict, sep="/")


@functools.lru_cache(maxsize=8)
def abstract_params(model: LanguageModel) -> Any:
    """Shapes, dtypes and logical names of the parameters, without computing them."""
    return jax.eval_shape(initializer(model), jax.random.key(0))


@functools.lru_cache(maxsize=8)
def initializer(model: LanguageModel) -> Callable[[jax.Array], Any]:
    """key -> parameters, boxed with their names. One function for shapes and values, traced once."""
    return jax.jit(lambda key: without_kernels(model).init(key, jnp.zeros((1, 2), jnp.int32))["params"])


def without_kernels(model: LanguageModel) -> LanguageModel:
    """The same model with plain attention, for a few tokens in float32, which not every backend supports."""
    return model.clone(attention=PLAIN)


def count_parameters(model: LanguageModel) -> int:
    """Number of parameters, without padding of the vocabulary."""
    boxes = jax.tree.leaves(abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    return sum(
        math.prod(
            model.vocab_size if name == "vocab" else size for name, size in zip(box.names, box.value.shape, strict=True)
        )
        for box in boxes
    )


def shapes_by_path(boxed: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree of abstract parameters, by slash-separated paths."""
    return {path: leaf.shape for path, leaf in flatten(nn.meta.unbox(boxed)).items()}


def parameter_axes(model: LanguageModel) -> Any:
    """The logical names of each parameter's dimensions, as tuples in the tree of the parameters."""
    return jax.tree.map(
        lambda box: tuple(box.names),
        abstract_params(model),
        is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned),
    )


def with_dtype(abstract: Any, dtype: str) -> Any:
    """The same shapes with another dtype, except those of biases that balance the load of experts."""
    return _map_changeable(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)), abstract)


def cast(params: Any, dtype: str) -> Any:
    """Every leaf in `dtype`, except biases that balance the load of experts, since their updates are small, and
    parameters that are stored in 8 bits."""
    return _map_changeable(lambda _, leaf: leaf.astype(dtype), params)


def cast_to_compute(params: Any, dtype: str) -> Any:
    """`cast` without rounding the parameters of norms and routers: these few compute in float32. Rounded to 16 bits,
    those of norms are the largest error of many gradients, and those of routers select other experts."""

    def change(path: Sequence[str], leaf: Any) -> Any:
        is_exact = any(name.startswith(_NOT_ROUNDED) for name in path[:-1])
        return leaf.astype(jnp.promote_types(leaf.dtype, dtype) if is_exact else dtype)

    return _map_changeable(change, params)


def _map_changeable(function: Callable[[Sequence[str], Any], Any], params: Any) -> Any:
    def change(path: Any, leaf: Any) -> Any:
        names = [str(getattr(entry, "key", "")) for entry in path]
        is_kept = names[-1] in (BIAS, STORED_SCALE) or leaf.dtype in EIGHT_BIT_TYPES
        return leaf if is_kept else function(names, leaf)

    return jax.tree_util.tree_map_with_path(change, params)
