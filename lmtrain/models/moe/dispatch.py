"""Tokens in the order of their experts, and back. Both directions are gathers, also in the backward pass: the gradient
of one is the other, so that no sum depends on the order of atomic additions.

    T tokens  K experts of a token  R rows, one for each selected expert of a token  E experts  D embed
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.layers.remat import ROUTED


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
