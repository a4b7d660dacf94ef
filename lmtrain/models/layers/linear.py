"""The linear layer and the embedding table: parameters whose dimensions are declared as (axis, size) pairs.

These replace `nn.DenseGeneral`, which initializes a flattened kernel: logical names of full rank then fail under a
mesh, and shorter ones silently mismatch.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer

from lmtrain.models.layers.embedding import gather_table, look_up
from lmtrain.models.layers.quantized import KERNEL, QUANTIZED, SCALE, Quantized, product, stored_product
from lmtrain.sharding.axes import PARAMETER_AXES, check_axes
from lmtrain.sharding.local import split_over

Dims = tuple[tuple[str, int], ...]

# The variable collection of adapters, next to `params`: `lora_a` [r, in], `lora_b` [out, r] and, with dropout, its
# rate `lora_rate`, of each adapted layer.
LORA = "lora"
RATE = "lora_rate"


def declare(init: Initializer, dims: Dims) -> Callable[..., Any]:
    """The initializer of a parameter whose dimensions carry the logical names of `dims`."""
    names = tuple(axis for axis, _ in dims)
    check_axes(names, PARAMETER_AXES)
    return nn.with_logical_partitioning(init, names)


def sizes(dims: Dims) -> tuple[int, ...]:
    """The sizes of named dimensions."""
    return tuple(size for _, size in dims)


class Linear(nn.Module):
    """y = x W + b over the last dimensions of x: [..., *inputs] -> [..., *outputs].

    All leading dimensions are flattened: with [tokens, inputs] the compiler uses its fast matrix product for the weight
    gradient too, with [batch, position, inputs] not on every platform. Positions that are split over devices remain a
    dimension: flattened with the batch, the compiler would gather them.
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
        if not split_over("act_stream"):
            x = x.reshape(math.prod(leading), *sizes(self.inputs))
        quantized = self._in_8_bits()
        if quantized is None:
            contracted = tuple(range(x.ndim - rank, x.ndim)), tuple(range(rank))
            y = jax.lax.dot_general(x, self.kernel, (contracted, ((), ())))
        elif self.has_variable(QUANTIZED, KERNEL):
            y = product(x, self.kernel, quantized, rank)
        else:
            y = stored_product(x, quantized, rank)
        if self.use_bias:
            y = add_bias(y, self.bias)
        if self.has_variable(LORA, "lora_a"):
            y = y + self._adapted(x).reshape(y.shape)
        return y.reshape(*leading, *sizes(self.outputs))

    def _in_8_bits(self) -> Quantized | None:
        """The 8-bit copy of the kernel, or the kernel itself if it is stored so; None: it has 16 or 32 bits."""
        if not self.has_variable(QUANTIZED, SCALE):
            return None
        has_copy = self.has_variable(QUANTIZED, KERNEL)
        values = self.get_variable(QUANTIZED, KERNEL) if has_copy else self.kernel
        return Quantized(values, self.get_variable(QUANTIZED, SCALE))

    def _adapted(self, x: jax.Array) -> jax.Array:
        """The output of the layer's adapter (Hu et al. 2021, LoRA), [..., out]: x A^T B^T, with dropout on x."""
        x = x.reshape(*x.shape[: x.ndim - len(self.inputs)], -1)
        a: jax.Array = self.get_variable(LORA, "lora_a")
        b: jax.Array = self.get_variable(LORA, "lora_b")
        if self.has_rng(LORA) and self.has_variable(LORA, RATE):
            rate: jax.Array = self.get_variable(LORA, RATE)
            kept = jax.random.bernoulli(self.make_rng(LORA), 1 - rate, x.shape)
            x = jnp.where(kept, x / (1 - rate).astype(x.dtype), 0)
        return (x @ a.T) @ b.T


@jax.custom_vjp
def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y [..., *outputs] + bias [*outputs]. The bias's gradient is summed over all tokens in float32: JAX's own sum is
    in y's dtype, and with thousands of terms in bfloat16 its error is 8 %."""
    return y + bias


def _bias_forward(y: jax.Array, bias: jax.Array) -> tuple[jax.Array, Any]:
    return y + bias, jnp.zeros((0, *bias.shape), bias.dtype)


def _bias_backward(like: jax.Array, d_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens = tuple(range(d_y.ndim - (like.ndim - 1)))
    return d_y, jnp.sum(d_y, tokens, dtype=jnp.float32).astype(like.dtype)


add_bias.defvjp(_bias_forward, _bias_backward)


class Embed(nn.Module):
    """A table of vectors, [entries, embed]; called with ids [B, S] it returns their rows. It can also be the head."""

    entries: tuple[str, int]
    embed: int
    kernel_init: Initializer
    is_head: bool = False

    def setup(self) -> None:
        dims = (self.entries, ("embed", self.embed))
        table = self.param("embedding", declare(self.kernel_init, dims), sizes(dims), jnp.float32)
        self.embedding = gather_table(table) if self.is_head else table

    def __call__(self, ids: jax.Array) -> jax.Array:
        return look_up(self.embedding, ids, self.entries[0], self.is_head)

    def add_to(self, x_BSD: jax.Array, positions_BS: jax.Array | None = None) -> jax.Array:
        """x plus the rows at these positions, by default 0, 1, ... in every sequence: learned positions."""
        if positions_BS is None:
            return add_bias(x_BSD, self.embedding[: x_BSD.shape[1]])
        return x_BSD + self(positions_BS)

    def add_from(self, x_BSD: jax.Array, start: jax.Array) -> jax.Array:
        """x plus the rows at positions `start`, `start + 1`, ...: for sampling. `start` is a scalar, or [B]."""
        positions = jnp.reshape(start, (-1, 1)) + jnp.arange(x_BSD.shape[1])  # [1, S] or [B, S]
        return x_BSD + jnp.take(self.embedding, positions, axis=0)
