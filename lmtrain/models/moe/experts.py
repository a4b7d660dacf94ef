"""The experts of a mixture: MLPs with a gate, each applied to the tokens that selected it, on the devices of a mesh.

A device sorts the selections of its own tokens by expert, and multiplies them by grouped products. Parameters split by
FSDP are gathered before. Where experts are split over devices (expert parallelism), these gather each other's tokens,
compute the selections of their own experts, and add and scatter the results. Where the width of experts is split
(tensor parallelism), they do so for the parts of a sequence.

    B batch  S position  D embed  T tokens of a device  K experts of a token  R rows  E experts  F width
"""

import functools
import math
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec

from lmtrain.models.layers.linear import declare, sizes
from lmtrain.models.layers.mlp import ACTIVATIONS
from lmtrain.models.layers.quantized import KERNEL, QUANTIZED, SCALE, Quantized
from lmtrain.models.layers.remat import ROUTED, SAVED_EXPERTS
from lmtrain.models.moe.grouped import grouped
from lmtrain.sharding.local import gather, num_parts, per_device, scatter_sum, split_over
from lmtrain.sharding.placement import stream_axes

# Tokens in the order of their experts, and back. Both directions are gathers, also in the backward pass: the gradient
# of one is the other, so that no sum depends on the order of atomic additions.
#
#     T tokens  K experts of a token  R rows, one for each selected expert of a token  E experts  D embed


class Rows(NamedTuple):
    """Rows sorted by expert: `selections` [R] of all T K ones, `row_of` [T, K] the row of each selection, or a number
    outside 0 ... R - 1 if it has none, `sizes` [E] the number of rows of each expert; int32. Rows after the last
    expert's belong to none.
    """

    selections: jax.Array
    row_of: jax.Array
    sizes: jax.Array

    @property
    def tokens(self) -> jax.Array:
        """The token of each row, [R]."""
        return self.selections // self.row_of.shape[1]


def sort_by_expert(experts_TK: jax.Array, num_experts: int) -> Rows:
    """The rows of all selections. Those of experts that are not in 0 ... `num_experts` - 1 come last."""
    is_here = (experts_TK >= 0) & (experts_TK < num_experts)
    flat = jnp.where(is_here, experts_TK, num_experts).reshape(-1).astype(jnp.int32)
    selections = jax.lax.iota(jnp.int32, flat.size)
    ordered, selection_R = jax.lax.sort((flat, selections), num_keys=1, is_stable=True)
    _, rows = jax.lax.sort((selection_R, selections), num_keys=1)
    ends_E = jnp.searchsorted(ordered, jax.lax.iota(jnp.int32, num_experts), side="right", method="sort")
    sizes_E = jnp.diff(ends_E.astype(jnp.int32), prepend=0)
    return Rows(*(checkpoint_name(x, ROUTED) for x in (selection_R, rows.reshape(experts_TK.shape), sizes_E)))


def part_of(rows: Rows, begin: jax.Array, length: int) -> Rows:
    """The `length` rows from `begin` on, of those that have an expert."""
    total = rows.sizes.sum()
    padded = jnp.pad(rows.selections, (0, length))
    ends_E = jnp.clip(jnp.cumsum(rows.sizes) - begin, 0, length)
    row_TK = jnp.where(rows.row_of < total, rows.row_of - begin, -1)
    return Rows(
        jax.lax.dynamic_slice_in_dim(padded, begin, length), row_TK, jnp.diff(ends_E, prepend=0).astype(jnp.int32)
    )


@jax.custom_vjp
def to_rows(x_TD: jax.Array, rows: Rows) -> jax.Array:
    """The row of each token, [R, D]. Gradients of rows without an expert have to be 0."""
    return x_TD[rows.tokens]


@jax.custom_vjp
def sum_of_rows(y_RD: jax.Array, rows: Rows) -> jax.Array:
    """The sum of the rows of each token, [T, D]; added in float32."""
    num_rows = y_RD.shape[0]
    exists_TK = (rows.row_of >= 0) & (rows.row_of < num_rows)
    # one gather for each selection: their sum is fused, [T, K, D] would be stored
    parts = (
        jnp.where(exists_TK[:, k, None], y_RD[jnp.clip(rows.row_of[:, k], 0, num_rows - 1)], 0).astype(jnp.float32)
        for k in range(rows.row_of.shape[1])
    )
    return functools.reduce(jnp.add, parts).astype(y_RD.dtype)


to_rows.defvjp(lambda x, rows: (to_rows(x, rows), rows), lambda rows, d_y: (sum_of_rows(d_y, rows), None))
sum_of_rows.defvjp(lambda y, rows: (sum_of_rows(y, rows), rows), lambda rows, d_x: (to_rows(d_x, rows), None))


@jax.custom_vjp
def weights_of_rows(weights_TK: jax.Array, rows: Rows) -> jax.Array:
    """The weight of each row, [R]."""
    return weights_TK.reshape(-1)[rows.selections]


def _weights_backward(rows: Rows, d_R: jax.Array) -> tuple[Any, None]:
    exists_TK = (rows.row_of >= 0) & (rows.row_of < d_R.size)
    return jnp.where(exists_TK, d_R[jnp.clip(rows.row_of, 0, d_R.size - 1)], 0), None


weights_of_rows.defvjp(lambda weights, rows: (weights_of_rows(weights, rows), rows), _weights_backward)


# Where experts are split, rows are computed in rounds of this many times the mean number of a device, rounded up to a
# multiple: memory is the same for any load, and balanced loads take one round.
_PER_MEAN, _MULTIPLE = 1.25, 128
# Parts of the names of operations in a compiled program: of all of the experts', and of those in rounds.
EXPERTS_SCOPE, ROUNDS = "sparse_experts", "rounds_of_experts"


class Gate(NamedTuple):
    """The hidden units of experts from their two products: activation(gate) * up, or with a `limit` c, gate <= c and
    -c <= up <= c, gate * sigmoid(1.702 gate) * (up + 1) (gpt-oss)."""

    activation: str
    limit: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.limit is None:
            return ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)


_SLOPE = 1.702


class Matrices(NamedTuple):
    """The matrices of experts: gate and up [E, D, F], down [E, F, D]; or their biases [E, F] and [E, D], or 8-bit
    copies (`Quantized`), or None."""

    gate: Any
    up: Any
    down: Any


_NONE = Matrices(None, None, None)


class Experts(nn.Module):
    """down(hidden(gate(x), up(x))) of each selected expert, added with the router's weights."""

    num_experts: int
    embed: int
    width: int
    hidden: Gate
    kernel_init: Initializer
    has_biases: bool = False

    def setup(self) -> None:
        embed, width = ("expert_embed", self.embed), ("expert_mlp", self.width)
        experts = ("expert", self.num_experts)
        how = self.kernel_init, self.has_biases
        self.gate, self.up = (ExpertMatrices((experts, embed, width), *how) for _ in range(2))
        self.down = ExpertMatrices((experts, width, embed), *how)

    def __call__(self, x_BSD: jax.Array, experts_BSK: jax.Array, weights_BSK: jax.Array) -> jax.Array:
        modules = Matrices(self.gate, self.up, self.down)
        matrices = Matrices(*(module() for module in modules))
        if self.is_initializing():
            return x_BSD
        copies = Matrices(*(module.quantized() for module in modules))
        biases = Matrices(*(module.bias for module in modules)) if self.has_biases else _NONE
        return apply_experts(x_BSD, experts_BSK, weights_BSK, matrices, self.hidden, copies, biases)


class ExpertMatrices(nn.Module):
    """A matrix of each expert, `kernel` [E, inputs, outputs], and a `bias` [E, outputs]."""

    dims: tuple[tuple[str, int], ...]
    kernel_init: Initializer
    has_bias: bool

    def setup(self) -> None:
        if self.has_bias:
            dims = self.dims[0], self.dims[2]
            self.bias = self.param("bias", declare(nn.initializers.zeros, dims), sizes(dims), jnp.float32)
        self.kernel = self.param(KERNEL, declare(self.kernel_init, self.dims, 1), sizes(self.dims), jnp.float32)

    def __call__(self) -> jax.Array:
        kernel: jax.Array = self.kernel
        return kernel

    def quantized(self) -> Quantized | None:
        """The 8-bit copy, if there is one."""
        if not self.has_variable(QUANTIZED, KERNEL):
            return None
        return Quantized(*(self.get_variable(QUANTIZED, name) for name in (KERNEL, SCALE)))


def apply_experts(
    x_BSD: jax.Array,
    experts_BSK: jax.Array,
    weights_BSK: jax.Array,
    matrices: Matrices,
    hidden: Gate,
    copies: Matrices = _NONE,
    biases: Matrices = _NONE,
) -> jax.Array:
    """The weighted sum of each token's experts, [B, S, D]; with `copies`, products are in 8 bits."""
    split = _Split.of(*x_BSD.shape[:2])

    def joined(local: Matrices) -> Matrices:
        """The parts of matrices that FSDP splits, joined."""
        gate, up = (gather(gather(m, split.embed, 1), split.width, 2) for m in local[:2])
        return Matrices(gate, up, gather(gather(local.down, split.embed, 2), split.width, 1))

    def on_device(
        x: jax.Array, experts: jax.Array, weights: jax.Array, matrices: Matrices, copies: Matrices, biases: Matrices
    ) -> jax.Array:
        matrices = joined(matrices)
        if biases.down is not None:
            gate, up = (gather(bias, split.width, 1) for bias in biases[:2])
            is_first = jax.lax.axis_index(split.tensor) == 0 if split.tensor else True  # of those whose sum is taken
            biases = Matrices(gate, up, jnp.where(is_first, gather(biases.down, split.embed, 1), 0))
        if copies.gate is not None:
            values = joined(Matrices(*(copy.values for copy in copies)))
            copies = Matrices(*(Quantized(v, copy.scale) for v, copy in zip(values, copies, strict=True)))
        x, experts, weights = (
            gather(gather(a, split.gather_positions, 1), split.gather_batch, 0) for a in (x, experts, weights)
        )
        shape = x.shape
        x, experts, weights = (a.reshape(-1, a.shape[-1]) for a in (x, experts, weights))
        if split.over_experts:
            experts = experts - jax.lax.axis_index(split.over_experts) * len(matrices.gate)
        y = _of_tokens(x, experts, weights, matrices, biases, hidden, num_parts(split.over_experts), copies)
        y = y.reshape(shape)
        if split.sum_over:
            y = jax.lax.psum(y, split.sum_over)
        return scatter_sum(scatter_sum(y, split.gather_batch, 0), split.gather_positions, 1)

    by_token = PartitionSpec(split.batch, split.positions)
    embed, width = split.embed, split.width + split.tensor
    into = PartitionSpec(split.over_experts, embed, width)
    out = PartitionSpec(split.over_experts, width, embed)
    specs = Matrices(into, into, out)
    of_copies = Matrices(
        *(None if copy is None else Quantized(spec, PartitionSpec()) for spec, copy in zip(specs, copies, strict=True))
    )
    of_biases = _NONE
    if biases.down is not None:
        of_hidden = PartitionSpec(split.over_experts, width)
        of_biases = Matrices(of_hidden, of_hidden, PartitionSpec(split.over_experts, embed))
    mapped = per_device(on_device, (by_token, by_token, by_token, specs, of_copies, of_biases), by_token)
    with jax.named_scope(EXPERTS_SCOPE):
        y: jax.Array = mapped(x_BSD, experts_BSK, weights_BSK, matrices, copies, biases)
    return y


class _Split(NamedTuple):
    """Mesh axes: that split batch and positions, experts, and the dimensions of their matrices: `embed` and `width` by
    FSDP, `tensor` as tensor parallelism splits the width. Tokens are gathered over `gather_batch` and
    `gather_positions`; results are scattered there, and summed over `sum_over`, which do not split tokens."""

    batch: tuple[str, ...]
    positions: tuple[str, ...]
    over_experts: tuple[str, ...]
    embed: tuple[str, ...]
    width: tuple[str, ...]
    tensor: tuple[str, ...]

    @classmethod
    def of(cls, batch: int, length: int) -> "_Split":
        batch_axes = split_over("act_batch")
        width = split_over("expert_mlp")
        tensor = tuple(name for name in width if name in split_over("act_mlp"))
        return cls(
            batch_axes if batch % num_parts(batch_axes) == 0 else (),  # a few sequences, in generation
            stream_axes(length),
            split_over("expert"),
            split_over("expert_embed"),
            tuple(name for name in width if name not in tensor),
            tensor,
        )

    @property
    def _shared(self) -> tuple[str, ...]:
        """The axes over which devices compute parts of the same tokens' results."""
        return self.over_experts + self.tensor

    @property
    def gather_batch(self) -> tuple[str, ...]:
        return tuple(name for name in self.batch if name in self._shared)

    @property
    def gather_positions(self) -> tuple[str, ...]:
        return tuple(name for name in self.positions if name in self._shared)

    @property
    def sum_over(self) -> tuple[str, ...]:
        return tuple(name for name in self._shared if name not in self.batch + self.positions)


def _of_tokens(
    x_TD: jax.Array,
    experts_TK: jax.Array,
    weights_TK: jax.Array,
    matrices: Matrices,
    biases: Matrices,
    hidden: Gate,
    parts: int,
    copies: Matrices = _NONE,
) -> jax.Array:
    """The results of this device's experts, of `parts` times as many, for tokens that it has, [T, D]."""
    number = len(matrices.gate)
    rows = sort_by_expert(experts_TK, number)
    of_rows = functools.partial(_of_rows, hidden=hidden)
    arrays = x_TD, weights_TK, matrices, biases._replace(down=None), rows, copies
    y = of_rows(*arrays) if parts == 1 else _in_rounds(of_rows, rows_of_round(experts_TK.size, parts), *arrays)
    if biases.down is None:
        return y
    # by tokens, of which there are fewer than rows
    of_experts = jnp.where(experts_TK[..., None] == jnp.arange(number), weights_TK[..., None], 0).sum(1)
    return (y + _selected(of_experts.astype(x_TD.dtype), biases.down)).astype(x_TD.dtype)


def _selected(weights_RE: jax.Array, bias_EF: jax.Array) -> jax.Array:
    """The weighted sums of experts' biases, float32 [R, F]. A product: its gradient adds in a fixed order."""
    return jnp.matmul(weights_RE, bias_EF.astype(weights_RE.dtype), preferred_element_type=jnp.float32)


def rows_of_round(rows: int, parts: int) -> int:
    """The number of rows at once, of `rows` of all experts, of which a device has one of `parts` parts."""
    return rows if parts == 1 else min(math.ceil(rows / parts * _PER_MEAN / _MULTIPLE) * _MULTIPLE, rows)


def _of_rows(
    x_TD: jax.Array,
    weights_TK: jax.Array,
    matrices: Matrices,
    biases: Matrices,
    rows: Rows,
    copies: Matrices,
    hidden: Gate,
) -> jax.Array:
    """The weighted sums of these rows, [T, D], without the bias of the outputs. Weights multiply hidden units, so that
    no gradient needs the outputs."""
    x = to_rows(x_TD, rows)
    gate, up = (
        checkpoint_name(grouped(x, matrix, rows.sizes, copy), SAVED_EXPERTS).astype(jnp.float32)
        for matrix, copy in zip(matrices[:2], copies[:2], strict=True)
    )
    if biases.gate is not None:
        ends = jnp.cumsum(rows.sizes)
        at = jnp.arange(len(x))[:, None]
        is_of = ((at < ends) & (at >= ends - rows.sizes)).astype(x.dtype)
        gate, up = gate + _selected(is_of, biases.gate), up + _selected(is_of, biases.up)
    units = (hidden(gate, up) * weights_of_rows(weights_TK, rows)[:, None]).astype(x.dtype)
    return sum_of_rows(grouped(units, matrices.down, rows.sizes, copies.down), rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_rounds(
    of_rows: Any,
    length: int,
    x_TD: jax.Array,
    weights_TK: jax.Array,
    matrices: Matrices,
    biases: Matrices,
    rows: Rows,
    copies: Matrices,
) -> jax.Array:
    """The sum of `of_rows` for `length` rows at a time, as many times as there are rows. Each device has its own number
    of rounds: they contain no communication."""

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        part = part_of(rows, number * length, length)
        return total + of_rows(x_TD, weights_TK, matrices, biases, part, copies).astype(jnp.float32)

    zeros = jnp.zeros(x_TD.shape, jnp.float32)
    with jax.named_scope(ROUNDS):
        return jax.lax.fori_loop(0, _rounds(rows, length), add, zeros).astype(x_TD.dtype)


def _rounds(rows: Rows, length: int) -> jax.Array:
    return -(-rows.sizes.sum() // length)


def _forward(of_rows: Any, length: int, *arguments: Any) -> tuple[jax.Array, Any]:
    return _in_rounds(of_rows, length, *arguments), arguments


def _backward(of_rows: Any, length: int, saved: Any, d_y: jax.Array) -> tuple[Any, ...]:
    *inputs, rows, copies = saved

    def add(number: jax.Array, totals: Any) -> Any:
        part = part_of(rows, number * length, length)
        again = jax.checkpoint(functools.partial(of_rows, rows=part, copies=copies), prevent_cse=False)
        _, pull = jax.vjp(again, *inputs)
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), totals, pull(d_y))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tuple(inputs))
    with jax.named_scope(ROUNDS):
        totals = jax.lax.fori_loop(0, _rounds(rows, length), add, zeros)
    return *jax.tree.map(lambda total, x: total.astype(x.dtype), totals, tuple(inputs)), None, None


_in_rounds.defvjp(_forward, _backward)
