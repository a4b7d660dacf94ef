"""Attention kernels on each device's own sequences and heads; otherwise the compiler would gather their inputs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.sharding.local import num_parts, per_device, split_over

Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def per_heads(
    kernel: Kernel,
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSC: jax.Array,
    segments_BS: jax.Array | None,
    slopes_H: jax.Array | None = None,
) -> jax.Array:
    """`kernel(q, k, v, segments, slopes)` of each device's part; zeros stand for missing segments and slopes.

    Devices that split the sequence outside split the heads inside: an all-to-all collects all positions of each
    device's heads (Jacobs et al. 2023, "DeepSpeed Ulysses"). Where devices split the query heads and the key heads
    cannot be split in the same way, each query head gets its own copy.
    """
    batch, heads, length, _ = q_BHSC.shape
    kv_heads = k_BKSC.shape[1]
    by_batch, by_heads, by_keys = (split_over(axis) for axis in ("act_batch", "act_heads", "act_kv_heads"))
    positions = split_over("act_seq")
    if not by_heads and heads % num_parts(positions) == 0:
        by_heads = positions
        by_keys = positions if kv_heads % num_parts(positions) == 0 else ()
    if by_heads != by_keys and kv_heads != heads:
        k_BKSC, v_BKSC = (jnp.repeat(x, heads // kv_heads, axis=1) for x in (k_BKSC, v_BKSC))
    segments = jnp.zeros((batch, length), jnp.int32) if segments_BS is None else segments_BS
    slopes = jnp.zeros(heads, jnp.float32) if slopes_H is None else slopes_H
    of_heads = PartitionSpec(by_batch, by_heads)
    specs = (of_heads, of_heads, of_heads, PartitionSpec(by_batch), PartitionSpec(by_heads))
    mixed: jax.Array = per_device(kernel, specs, of_heads)(q_BHSC, k_BKSC, v_BKSC, segments, slopes)
    return mixed
