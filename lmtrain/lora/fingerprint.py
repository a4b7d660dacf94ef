"""A fingerprint of parameters: equal for equal values, on any mesh, computed where they are."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.params import flatten
from lmtrain.sharding.mesh import Layout

# Odd constants of MurmurHash3's finalizer, and of Fibonacci hashing.
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_POSITION = 0x9E3779B9


def fingerprint(params: Any, layout: Layout) -> str:
    """A hash of names, shapes, dtypes and values: 32 hexadecimal digits. No array is gathered.

    Each value is mixed with its position; the sums modulo 2^32 do not depend on the order of the additions.
    """
    flat = flatten(params)
    sum_each = jax.jit(lambda flat: jax.tree.map(_of_leaf, flat), out_shardings=layout.replicated)
    sums = jax.device_get(sum_each(flat))
    parts = [f"{path} {leaf.shape} {leaf.dtype} {sums[path].tolist()}" for path, leaf in sorted(flat.items())]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _of_leaf(leaf: jax.Array) -> jax.Array:
    """Two sums over all values, uint32 [2]."""
    bits = jax.lax.bitcast_convert_type(leaf, jnp.uint16 if leaf.dtype.itemsize == 2 else jnp.uint32)
    position = jnp.uint32(0)
    for dim, size in enumerate(leaf.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
    mixed = bits.astype(jnp.uint32) ^ (position * jnp.uint32(_POSITION))
    sums = []
    for factor in _MIX:
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(factor)
        sums.append(jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32))
    return jnp.stack(sums)
