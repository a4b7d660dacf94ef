"""Gradient accumulation: sums over microbatches, one after the other, so that only one's activations are in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def sum_over_microbatches(
    function: Callable[[Any, jax.Array], Any], batch: Any, key: jax.Array, num_microbatches: int
) -> Any:
    """Sum of `function(microbatch, its own key)`: a tree of sums, in float32 if there are several microbatches."""
    if num_microbatches == 1:
        return function(batch, jax.random.fold_in(key, 0))
    # microbatch i has rows i, i + n, ...: so each spans all devices; contiguous parts of the batch would not
    split = jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

    def add(sums: Any, indexed: Any) -> tuple[Any, None]:
        index, micro = indexed
        new = function(micro, jax.random.fold_in(key, index))
        return jax.tree.map(lambda total, part: total + part.astype(total.dtype), sums, new), None

    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), jax.eval_shape(function, first, key))
    sums, _ = jax.lax.scan(add, zeros, (jnp.arange(num_microbatches), split))
    return sums
