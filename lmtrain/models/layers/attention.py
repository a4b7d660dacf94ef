"""Causal attention: softmax(q k^T * scale) v, the plain way."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

# Far below any score, and finite, so that a row with nothing to attend to gives no NaN.
_MASKED = -1e30

Drop = Callable[[jax.Array], jax.Array]


def attend(
    q_BHSC: jax.Array,
    k_BHTC: jax.Array,
    v_BHTC: jax.Array,
    scale: jax.Array | float,
    first_query: jax.Array | int = 0,
    upcast: bool = False,
    drop: Drop | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Each query sees the keys up to its own position; query s is at position `first_query + s`. -> [B, H, S, C]

    With `segments`, those of the queries [B, S] and of the keys [B, T], it sees only keys of its own segment. Softmax
    runs in float32; with `upcast` the scores do too. `drop` is applied to the attention weights.
    """
    if upcast:
        q_BHSC, k_BHTC = q_BHSC.astype(jnp.float32), k_BHTC.astype(jnp.float32)
    scores = jnp.einsum("BHSC,BHTC->BHST", q_BHSC * scale, k_BHTC).astype(jnp.float32)
    seen = jnp.arange(k_BHTC.shape[2]) <= first_query + jnp.arange(q_BHSC.shape[2])[:, None]
    if segments is not None:
        seen &= segments[0][:, None, :, None] == segments[1][:, None, None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1).astype(v_BHTC.dtype)
    if drop is not None:
        weights = drop(weights)
    return jnp.einsum("BHST,BHTC->BHSC", weights, v_BHTC)


def self_attend(
    q_BHSC: jax.Array,
    k_BHSC: jax.Array,
    v_BHSC: jax.Array,
    scale: jax.Array | float,
    upcast: bool = False,
    drop: Drop | None = None,
    segments_BS: jax.Array | None = None,
) -> jax.Array:
    """Attention of a whole sequence to itself, in two halves: the first needs none of the second's keys."""
    half = q_BHSC.shape[2] // 2
    s = segments_BS
    early, late = (None, None) if s is None else ((s[:, :half], s[:, :half]), (s[:, half:], s))
    first = attend(q_BHSC[:, :, :half], k_BHSC[:, :, :half], v_BHSC[:, :, :half], scale, 0, upcast, drop, early)
    second = attend(q_BHSC[:, :, half:], k_BHSC, v_BHSC, scale, half, upcast, drop, late)
    return jnp.concatenate([first, second], axis=2)
