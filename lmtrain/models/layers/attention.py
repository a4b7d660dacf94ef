"""Causal attention: softmax(q k^T * scale) v, the plain way."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Far below any score, and finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30

Drop = Callable[[jax.Array], jax.Array]


def attend(
    q_BHSC: jax.Array,
    k_BKTC: jax.Array,
    v_BKTC: jax.Array,
    scale: jax.Array | float,
    first_query: jax.Array | int = 0,
    upcast: bool = False,
    drop: Drop | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
) -> jax.Array:
    """Each query sees the keys up to its own position. -> [B, H, S, C]

    Query s is at position `first_query + s`, key t at t. With fewer key heads than query heads, key head
    k serves the H / K query heads from k H / K on. With a `window`, a query sees that many keys at most. With
    `segments`, those of the queries [B, S] and of the keys [B, T], it sees only keys of its own segment. Softmax runs
    in float32; with `upcast` the scores do too. `drop` is applied to the attention weights.
    """
    if upcast:
        q_BHSC, k_BKTC = q_BHSC.astype(jnp.float32), k_BKTC.astype(jnp.float32)
    batch, heads, queries, head_dim = q_BHSC.shape
    kv_heads, keys = k_BKTC.shape[1:3]
    groups = heads // kv_heads
    # the query heads of one key head as one longer sequence, so that keys need no copies
    q_BKSC = q_BHSC.reshape(batch, kv_heads, groups * queries, head_dim)
    scores = jnp.einsum("BKSC,BKTC->BKST", q_BKSC * scale, k_BKTC).astype(jnp.float32)
    query_at = first_query + jnp.arange(queries)[:, None]
    key_at = jnp.arange(keys)
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    if segments is not None:
        seen &= segments[0][:, None, :, None] == segments[1][:, None, None, :]
    if groups > 1:
        seen = jnp.concatenate([seen] * groups, axis=-2)
    weights = jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1).astype(v_BKTC.dtype)
    if drop is not None:
        weights = drop(weights)
    return jnp.einsum("BKST,BKTC->BKSC", weights, v_BKTC).reshape(q_BHSC.shape)


def self_attend(
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSC: jax.Array,
    scale: jax.Array | float,
    upcast: bool = False,
    drop: Drop | None = None,
    segments_BS: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attention of a whole sequence to itself, in two halves: the first needs none of the second's keys."""
    half = q_BHSC.shape[2] // 2
    s = segments_BS
    early, late = (None, None) if s is None else ((s[:, :half], s[:, :half]), (s[:, half:], s))
    k_early, v_early = k_BKSC[:, :, :half], v_BKSC[:, :, :half]
    first = attend(q_BHSC[:, :, :half], k_early, v_early, scale, 0, upcast, drop, early, window)
    second = attend(q_BHSC[:, :, half:], k_BKSC, v_BKSC, scale, half, upcast, drop, late, window)
    return jnp.concatenate([first, second], axis=2)
