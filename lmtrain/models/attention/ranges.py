"""The positions that queries of packed documents see, as ranges, for kernels that skip blocks."""

import jax
import jax.numpy as jnp


def ranges(segments_BS: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
    """The first key that each query sees, and the last query that sees each key, int32 [B, S]; both non-decreasing."""
    at = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    changes = segments_BS[:, 1:] != segments_BS[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, at, len(at) - 1), axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, at - window + 1), jnp.minimum(last, at + window - 1)
    return first, last
