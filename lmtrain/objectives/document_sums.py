"""Sums over the documents of each sequence, on each device for its own sequences."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.sharding.local import num_parts, per_device, split_over, sum_over
from lmtrain.sharding.placement import stream_axes


@jax.custom_vjp
def sum_by_document(values_BS: jax.Array, documents_BS: jax.Array) -> jax.Array:
    """The sum of the values of each document, [B, S] float32: entry n of a row is that of its document n.

    `documents` has the number of each position's document in its sequence.
    """
    batch, positions = _axes(values_BS)
    length = values_BS.shape[1]

    def local(values: jax.Array, documents: jax.Array) -> jax.Array:
        def row(values: jax.Array, documents: jax.Array) -> jax.Array:
            return jnp.zeros(length, jnp.float32).at[documents].add(values)

        return sum_over(positions, jax.vmap(row)(values.astype(jnp.float32), documents))

    rows = PartitionSpec(batch, positions)
    sums: jax.Array = per_device(local, (rows, rows), PartitionSpec(batch))(values_BS, documents_BS)
    return sums


def _forward(values: jax.Array, documents: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sum_by_document(values, documents), documents


def _backward(documents_BS: jax.Array, upstream: jax.Array) -> tuple[Any, None]:
    batch, positions = _axes(documents_BS)
    rows = PartitionSpec(batch, positions)
    take = functools.partial(jnp.take_along_axis, axis=1)
    return per_device(take, (PartitionSpec(batch), rows), rows)(upstream, documents_BS), None


sum_by_document.defvjp(_forward, _backward)


def _axes(array_BS: jax.Array) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that rows and positions are split over."""
    batch = split_over("act_batch")
    assert array_BS.shape[0] % num_parts(batch) == 0
    return batch, stream_axes(array_BS.shape[1])
