"""The linear layer and the embedding table: parameters whose dimensions are declared as (axis, size) pairs.

Own layers rather than `nn.DenseGeneral`, which initialises a flattened kernel: logical names of full rank then fail
under a mesh, shorter ones mismatch without a word.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from lmtrain.sharding.axes import PARAMETER_AXES, check_axes

Dims = tuple[tuple[str, int], ...]


def declare(init: Initializer, dims: Dims) -> Callable[..., Any]:
    """The initializer of a parameter whose dimensions carry the logical names of `dims`."""
    names = tuple(axis for axis, _ in dims)
    check_axes(names, PARAMETER_AXES)
    return nn.with_logical_partitioning(init, names)


def sizes(dims: Dims) -> tuple[int, ...]:
    return tuple(size for _, size in dims)


class Linear(nn.Module):
    """y = x W + b over the last dimensions of x: [..., *inputs] -> [..., *outputs].

    All leading dimensions are multiplied as one: with [tokens, inputs] the compiler finds its fast matrix product for
    the weight gradient too, with [batch, position, inputs] it does not on every backend.
    """

    inputs: Dims
    outputs: Dims
    kernel_init: Initializer
    use_bias: bool = True

    def setup(self) -> None:
        dims = self.inputs + self.outputs
        self.kernel = self.param("kernel", declare(self.kernel_init, dims), sizes(dims), jnp.float32)
        if self.use_bias:
            zeros = declare(nn.initializers.zeros, self.outputs)
            self.bias = self.param("bias", zeros, sizes(self.outputs), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        rank = len(self.inputs)
        leading = x.shape[: x.ndim - rank]
        flat = x.reshape(math.prod(leading), *sizes(self.inputs))
        contracted = tuple(range(1, rank + 1)), tuple(range(rank))
        y = jax.lax.dot_general(flat, self.kernel, (contracted, ((), ())))
        if self.use_bias:
            y = y + self.bias
        return y.reshape(*leading, *sizes(self.outputs))


class Embed(nn.Module):
    """A table of vectors, [entries, embed]; called with ids it gives their rows."""

    entries: tuple[str, int]
    embed: int
    kernel_init: Initializer

    def setup(self) -> None:
        dims = (self.entries, ("embed", self.embed))
        self.embedding = self.param("embedding", declare(self.kernel_init, dims), sizes(dims), jnp.float32)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return jnp.take(self.embedding, ids, axis=0)
