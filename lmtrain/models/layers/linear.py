"""The linear layer and the embedding table: parameters whose dimensions are declared as (axis, size) pairs.

These replace `nn.DenseGeneral`, which initializes a flattened kernel: logical names of full rank then fail under a
mesh, and shorter ones silently mismatch.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec

from lmtrain.models.layers.four_bits import ARRAYS, LEVELS, Blocks
from lmtrain.models.layers.quantized import KERNEL, QUANTIZED, SCALE, Quantized, product, stored_product
from lmtrain.models.layers.remat import unfused_gradient
from lmtrain.sharding.axes import PARAMETER_AXES, check_axes
from lmtrain.sharding.local import is_cpu_alone, num_parts, per_device, scatter_sum, split_over, sum_over
from lmtrain.sharding.placement import gather_rows, gather_stored, stream_axes

# Lookup of rows of an embedding table, with a gradient that is summed in float32 for any dtype of the table.
#
# In bfloat16, the sum of a frequent token's gradient over thousands of positions loses single contributions to
# rounding.


class _Split(NamedTuple):
    """Static arguments: the mesh axes that split sequences, positions of the result, and the table's two dimensions."""

    batch: tuple[str, ...]
    positions: tuple[str, ...]
    entries: tuple[str, ...]
    embed: tuple[str, ...]
    is_gathered: bool

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes that split the table along D: those that split the batch too, and those that split positions."""
        return tuple(name for name in self.embed if name in self.batch), tuple(
            name for name in self.embed if name in self.positions
        )

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes that split positions of the result but not of the ids: other devices have the rows."""
        return tuple(name for name in self.positions if name in self.entries)

    @property
    def of_ids(self) -> PartitionSpec:
        return PartitionSpec(self.batch, tuple(name for name in self.positions if name not in self.entries))

    @property
    def of_table(self) -> PartitionSpec:
        return PartitionSpec(self.entries, self.embed)

    @property
    def of_result(self) -> PartitionSpec:
        return PartitionSpec(self.batch, self.positions)


@jax.custom_vjp
def gather_table(table_VD: jax.Array) -> jax.Array:
    """Gather a table that is also the head along D, as the loss needs it, once for both uses.

    Its gradient is split like the stored table.
    """
    return gather_rows(table_VD)


gather_table.defvjp(lambda table: (gather_rows(table), None), lambda _, gradient: (gradient,))


def look_up(table_VD: jax.Array, ids_BS: jax.Array, entries: str, is_gathered: bool = False) -> jax.Array:
    """The rows of the table, [B, S, D]. `entries` is the logical name of its first dimension.

    `is_gathered`: the table comes from `gather_table`.

    Where devices that split the batch or positions split the table along D too (FSDP), each looks up its columns for
    the ids of all devices, and an all-to-all collects the rows of each device's ids; the gradient takes the reverse
    path. If there are more ids than rows, as in evaluation, the table is gathered instead, which sends less. Where
    other devices split the table along V (tensor parallelism), each returns its own rows, and zeros for others.
    """
    split = _Split(
        split_over("act_batch"), stream_axes(ids_BS.shape[1]), split_over(entries), split_over("embed"), is_gathered
    )
    is_usual = (
        split.embed == sum(split.columns, ())
        and not set(split.entries) & {*split.batch, *split.embed}
        and ids_BS.shape[0] % num_parts(split.batch) == 0
    )
    return _look_up(table_VD, ids_BS, split) if is_usual else _plain_look_up(table_VD, ids_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _look_up(table: jax.Array, ids: jax.Array, split: _Split) -> jax.Array:
    return _gather(table, ids, split)


def _gather(table: jax.Array, ids: jax.Array, split: _Split) -> jax.Array:
    if split.is_gathered:
        split = split._replace(embed=())
    more_ids_than_rows = ids.size // num_parts((*split.batch, *split.positions)) > table.shape[0]

    by_batch, by_position = split.columns

    def local(table: jax.Array, ids: jax.Array) -> jax.Array:
        if split.embed and more_ids_than_rows:
            table = jax.lax.all_gather(table, split.embed, axis=1, tiled=True)
        elif split.embed:
            ids = _gather_ids(ids, split)
        if split.entries:
            row, is_mine = _rows(table, ids, split)
            rows = jnp.take(table, jnp.where(is_mine, row, 0), axis=0)
            rows = jnp.where(is_mine[..., None], rows, 0)
            rows = scatter_sum(rows, split.gathered, rows.ndim - 2)
            rows = sum_over(tuple(name for name in split.entries if name not in split.gathered), rows)
        else:
            rows = jnp.take(table, ids, axis=0)
        if split.embed and not more_ids_than_rows:
            if by_position:
                rows = jax.lax.all_to_all(rows, by_position, 1, 3, tiled=True).squeeze(1)
            if by_batch:
                rows = jax.lax.all_to_all(rows, by_batch, 0, 2, tiled=True)
        return rows

    rows: jax.Array = per_device(local, (split.of_table, split.of_ids), split.of_result)(table, ids)
    return rows


def _forward(table: jax.Array, ids: jax.Array, split: _Split) -> tuple[jax.Array, Any]:
    return _gather(table, ids, split), (jnp.zeros((0, *table.shape), table.dtype), ids)


def _backward(split: _Split, saved: Any, d_rows: jax.Array) -> tuple[jax.Array, None]:
    like, ids = saved
    (entries, width), dtype = like.shape[1:], like.dtype
    shape = entries // num_parts(split.entries), width // num_parts(split.embed)
    elsewhere = tuple(name for name in (*split.batch, *split.positions) if name not in (*split.embed, *split.entries))

    def local(d_rows: jax.Array, ids: jax.Array) -> jax.Array:
        by_batch, by_position = split.columns
        ids = _gather_ids(ids, split)
        if by_batch:
            # exchanged along the last dimension, XLA:GPU would store the entire residual stream by columns
            d_rows = d_rows.reshape(*d_rows.shape[:2], num_parts(by_batch), -1).transpose(2, 0, 1, 3)
            d_rows = jax.lax.all_to_all(d_rows, by_batch, 0, 0, tiled=True).reshape(-1, *d_rows.shape[2:])
        if by_position:
            d_rows = jax.lax.all_to_all(d_rows[:, None], by_position, 3, 1, tiled=True)
        if split.gathered:
            d_rows = jax.lax.all_gather(d_rows, split.gathered, axis=d_rows.ndim - 2, tiled=True)
        d_table = jnp.zeros(shape, jnp.float32)
        row, is_mine = _rows(d_table, ids, split)
        row = jnp.where(is_mine, row, len(d_table))  # out of range: dropped
        d_table = d_table.at[row].add(d_rows.astype(jnp.float32), mode="drop")
        return sum_over(elsewhere, d_table).astype(dtype)

    d_table: jax.Array = per_device(local, (split.of_result, split.of_ids), split.of_table)(d_rows, ids)
    return d_table, None


_look_up.defvjp(_forward, _backward)


def _gather_ids(ids: jax.Array, split: _Split) -> jax.Array:
    """The ids of all devices that have other columns, [B, S]; if these split positions, [B, devices, S]."""
    by_batch, by_position = split.columns
    if by_batch:
        ids = jax.lax.all_gather(ids, by_batch, axis=0, tiled=True)
    return jax.lax.all_gather(ids, by_position, axis=1) if by_position else ids


def _rows(table: jax.Array, ids: jax.Array, split: _Split) -> tuple[jax.Array, jax.Array]:
    """Row numbers of ids in this device's part of the table, and a mask of those that it has."""
    first = jax.lax.axis_index(split.entries) * len(table) if split.entries else 0
    row = ids - first
    return row, (row >= 0) & (row < len(table))


@jax.custom_vjp
def _plain_look_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0)


def _plain_forward(table: jax.Array, ids: jax.Array) -> tuple[jax.Array, Any]:
    return jnp.take(table, ids, axis=0), (jnp.zeros((0, *table.shape), table.dtype), ids)


def _plain_backward(saved: Any, d_rows: jax.Array) -> tuple[jax.Array, None]:
    like, ids = saved
    d_table = jnp.zeros(like.shape[1:], jnp.float32).at[ids].add(d_rows.astype(jnp.float32))
    return d_table.astype(like.dtype), None


_plain_look_up.defvjp(_plain_forward, _plain_backward)


Dims = tuple[tuple[str, int], ...]


class Parameter(nn.LogicallyPartitioned):
    """A parameter with the logical names of its dimensions. The last `outputs` of them are the outputs of a matrix, and
    the others its inputs, but for those that stack matrices; 0: it is no matrix."""

    outputs: int = struct.field(pytree_node=False, default=0)


# The variable collection of adapters, next to `params`: `lora_a` [r, in], `lora_b` [out, r] and, with dropout, its
# rate `lora_rate`, of each adapted layer.
LORA = "lora"
RATE = "lora_rate"


def declare(init: Initializer, dims: Dims, outputs: int = 0) -> Callable[..., Any]:
    """The initializer of a parameter whose dimensions carry the logical names of `dims`; see `Parameter`."""
    names = tuple(axis for axis, _ in dims)
    check_axes(names, PARAMETER_AXES)
    return lambda *arguments, **keywords: Parameter(init(*arguments, **keywords), names, outputs=outputs)


def sizes(dims: Dims) -> tuple[int, ...]:
    """The sizes of named dimensions."""
    return tuple(size for _, size in dims)


class Linear(nn.Module):
    """y = x W + b over the last dimensions of x: [..., *inputs] -> [..., *outputs].

    All leading dimensions are flattened: with [tokens, inputs] the compiler uses its fast matrix product for the weight
    gradient too, with [batch, position, inputs] not on every platform. Positions that are split over devices remain a
    dimension: flattened with the batch, the compiler would gather them.

    `is_flat`: the product has one dimension of inputs and one of outputs, for what reads or writes rows of all heads;
    otherwise the compiler chooses the order of heads and positions in memory, as attention needs it. Not where devices
    split the heads: matrices that are split in two ways would be gathered whole.
    """

    inputs: Dims
    outputs: Dims
    kernel_init: Initializer
    use_bias: bool = True
    is_flat: bool = False

    def setup(self) -> None:
        dims = self.inputs + self.outputs
        declared = declare(self.kernel_init, dims, len(self.outputs))
        # a frozen kernel in 4 bits is not there
        self.four_bits = next((kind for kind in LEVELS if self.has_variable(QUANTIZED, kind)), None)
        if self.four_bits is None:
            self.kernel = self.param("kernel", declared, sizes(dims), jnp.float32)
        if self.use_bias:
            zeros = declare(nn.initializers.zeros, self.outputs)
            self.bias = self.param("bias", zeros, sizes(self.outputs), jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.without_bias(x)
        return add_bias(y, self.bias) if self.use_bias else y

    def without_bias(self, x: jax.Array) -> jax.Array:
        """x W, and the adapter's output."""
        rank = len(self.inputs)
        leading = x.shape[: x.ndim - rank]
        if not split_over("act_stream"):
            x = x.reshape(math.prod(leading), *sizes(self.inputs))
        quantized = self._quantized()
        # for the CPU XLA would transpose kernels of more than two dimensions in memory
        if quantized is None and ((self.is_flat and not split_over("heads")) or is_cpu_alone()):
            # the gradient is stored as one matrix: as several, the compiler would transpose the rows of the whole batch
            kernel = unfused_gradient(self.kernel.reshape(-1, math.prod(sizes(self.outputs))))
            y = x.reshape(-1, math.prod(sizes(self.inputs))) @ kernel
            y = y.reshape(-1, *sizes(self.outputs))
        elif quantized is None:
            contracted = tuple(range(x.ndim - rank, x.ndim)), tuple(range(rank))
            y = jax.lax.dot_general(x, self.kernel, (contracted, ((), ())))
        elif isinstance(quantized, Quantized) and self.has_variable(QUANTIZED, KERNEL):
            y = product(x, self.kernel, quantized, rank)
        else:
            y = stored_product(x, quantized, rank)
        if self.has_variable(LORA, "lora_a"):
            y = y + self._adapted(x).reshape(y.shape)
        return y.reshape(*leading, *sizes(self.outputs))

    def matrix(self) -> jax.Array:
        """W [*inputs, *outputs] with what the adapter adds to it, for what multiplies by W in other ways."""
        quantized = self._quantized()
        matrix = self.kernel if quantized is None else quantized.numbers(jnp.float32)
        if self.has_variable(LORA, "lora_a"):
            a: jax.Array = self.get_variable(LORA, "lora_a")
            b: jax.Array = self.get_variable(LORA, "lora_b")
            matrix = matrix + (a.T @ b.T).reshape(matrix.shape).astype(matrix.dtype)
        return matrix

    def _quantized(self) -> Quantized | Blocks | None:
        """The 8-bit copy of the kernel, or the kernel itself if it is stored in few bits; None: it has 16 or 32."""
        if self.four_bits is not None:
            first, outputs = self.inputs[0][0], [axis for axis, _ in self.outputs]
            arrays: dict[str, Any] = {name: self.get_variable(QUANTIZED, name) for name in ARRAYS}
            return Blocks(
                codes=gather_stored(self.get_variable(QUANTIZED, self.four_bits), [first, None, *outputs]),
                scale=gather_stored(arrays["scale"], [first, *outputs]),
                nested=arrays["nested"],
                offset=arrays["offset"],
                kind=self.four_bits,
                shape=sizes(self.inputs + self.outputs),
            )
        if not self.has_variable(QUANTIZED, SCALE):
            return None
        scale: jax.Array = self.get_variable(QUANTIZED, SCALE)
        if self.has_variable(QUANTIZED, KERNEL):
            return Quantized(self.get_variable(QUANTIZED, KERNEL), scale)
        return Quantized(gather_stored(self.kernel, [axis for axis, _ in self.inputs + self.outputs]), scale)

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
    """A table of vectors, [entries, embed]; called with ids [B, S] it returns their rows. It can also be the head, with
    a bias [entries] of the logits."""

    entries: tuple[str, int]
    embed: int
    kernel_init: Initializer
    is_head: bool = False
    has_bias: bool = False

    def setup(self) -> None:
        dims = (self.entries, ("embed", self.embed))
        if self.has_bias:
            zeros = declare(nn.initializers.zeros, dims[:1])
            self.bias = self.param("bias", zeros, sizes(dims[:1]), jnp.float32)
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
