"""Causal attention, softmax(q k^T * scale + bias) v: the plain backend, and the dispatch to other backends.

The features of backends, and the choice between them, are in `lmtrain/models/attention_backends.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.layers.remat import SAVED_ATTENTION

# Far below any score, but finite, so that a row without visible keys gives no NaN.
MASKED = -1e30

Drop = Callable[[jax.Array], jax.Array]


def attend(
    q_BHSC: jax.Array,
    k_BKTC: jax.Array,
    v_BKTC: jax.Array,
    scale: jax.Array | float,
    first_query: jax.Array | int = 0,
    *,
    upcast: bool = False,
    drop: Drop | None = None,
    segments: tuple[jax.Array, jax.Array] | None = None,
    window: int | None = None,
    slopes: np.ndarray | None = None,
) -> jax.Array:
    """Each query sees the keys up to its own position. -> [B, H, S, C]

    Query s is at position `first_query + s`, key t at t; `first_query` is a scalar, or [B]. With fewer key heads than
    query heads, key head k serves the H / K query heads from k H / K on. With a `window`, a query sees at most
    `window` keys. With `segments`, those of the queries [B, S] and of the keys [B, T], it sees only keys of its own
    segment. With `slopes` [H], scores grow by slope * (key position - query position) (ALiBi, Press et al. 2022).
    Softmax runs in float32; with `upcast` the scores do too. `drop` is applied to the attention weights.
    """
    if upcast:
        q_BHSC, k_BKTC = q_BHSC.astype(jnp.float32), k_BKTC.astype(jnp.float32)
    batch, heads, queries, head_dim = q_BHSC.shape
    kv_heads, keys = k_BKTC.shape[1:3]
    groups = heads // kv_heads
    # the query heads of one key head form one longer sequence, so that keys need not be copied
    q_BKSC = q_BHSC.reshape(batch, kv_heads, groups * queries, head_dim)
    scores = jnp.einsum("BKSC,BKTC->BKST", q_BKSC, k_BKTC).astype(jnp.float32) * scale
    query_at = first_query + jnp.arange(queries)[:, None]
    if jnp.ndim(first_query):  # [B, 1, S, 1]
        query_at = jnp.reshape(first_query, (-1, 1, 1, 1)) + jnp.arange(queries)[:, None]
    key_at = jnp.arange(keys)
    if slopes is not None:
        distance = jnp.expand_dims(key_at - query_at, -3)  # [1, S, T] or [B, 1, 1, S, T]
        bias = slopes.reshape(kv_heads, groups, 1, 1) * distance
        scores += bias.reshape(*bias.shape[:-4], kv_heads, groups * queries, keys)
    seen = key_at <= query_at
    if window is not None:
        seen &= key_at > query_at - window
    if segments is not None:
        seen &= segments[0][:, None, :, None] == segments[1][:, None, None, :]
    if groups > 1:
        seen = jnp.concatenate([seen] * groups, axis=-2)
    weights = jax.nn.softmax(jnp.where(seen, scores, MASKED), axis=-1).astype(v_BKTC.dtype)
    if drop is not None:
        weights = drop(weights)
    return jnp.einsum("BKST,BKTC->BKSC", weights, v_BKTC).reshape(*q_BHSC.shape[:3], v_BKTC.shape[-1])


def self_attend(
    backend: str,
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSC: jax.Array,
    scale: jax.Array | float,
    *,
    upcast: bool = False,
    drop: Drop | None = None,
    segments_BS: jax.Array | None = None,
    window: int | None = None,
    slopes: np.ndarray | None = None,
    block_size: int | None = None,
) -> jax.Array:
    """Attention of a full sequence to itself, by the named backend; arguments as in `attend`. -> [B, H, S, C]

    The caller has checked that the backend supports the arguments. `block_size` is a hint for backends with blocks.
    """
    if backend == "xla":
        mixed = _in_halves(q_BHSC, k_BKSC, v_BKSC, scale, upcast, drop, segments_BS, window, slopes)
        return checkpoint_name(mixed, SAVED_ATTENTION)
    assert drop is None, f"{backend} attention has no dropout"
    if backend == "blockwise":
        from lmtrain.models.layers.blockwise import blockwise

        return blockwise(q_BHSC, k_BKSC, v_BKSC, scale, segments_BS, window, slopes, block_size, upcast)
    if backend == "triton":
        from lmtrain.models.layers.triton.attention import triton

        return triton(q_BHSC, k_BKSC, v_BKSC, scale, segments_BS, window, slopes)
    assert slopes is None, f"{backend} attention has no ALiBi"
    assert not upcast, f"{backend} attention has no float32 scores"
    if backend == "splash":
        from lmtrain.models.layers.splash import splash

        return splash(q_BHSC, k_BKSC, v_BKSC, scale, segments_BS, window, block_size)
    assert backend == "cudnn", backend
    assert segments_BS is None, "cudnn attention has no segments"
    return checkpoint_name(_cudnn(q_BHSC, k_BKSC, v_BKSC, scale, window), SAVED_ATTENTION)


def _in_halves(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: jax.Array | float,
    upcast: bool,
    drop: Drop | None,
    segments_BS: jax.Array | None,
    window: int | None,
    slopes: np.ndarray | None,
) -> jax.Array:
    """Attention in two halves of the queries: the first half does not need the second half's keys."""
    half = q.shape[2] // 2
    s = segments_BS
    early, late = (None, None) if s is None else ((s[:, :half], s[:, :half]), (s[:, half:], s))
    how: dict[str, Any] = {"upcast": upcast, "drop": drop, "window": window, "slopes": slopes}
    first = attend(q[:, :, :half], k[:, :, :half], v[:, :, :half], scale, 0, segments=early, **how)
    second = attend(q[:, :, half:], k, v, scale, half, segments=late, **how)
    return jnp.concatenate([first, second], axis=2)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, scale: jax.Array | float, window: int | None) -> jax.Array:
    """The fused kernel of NVIDIA's cuDNN; it takes positions before heads."""
    q, k, v = (part.transpose(0, 2, 1, 3) for part in ((q * scale).astype(q.dtype), k, v))
    mixed = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn",
    )
    return mixed.transpose(0, 2, 1, 3)


def alibi_slopes(heads: int, bias_max: float) -> np.ndarray:
    """2^(-bias_max m / n) for m = 1..n with n heads rounded up to a power of two; float32 [heads].

    If n is greater than the number of heads, every second slope comes first, then those in between, and the first
    `heads` of these are used (Press et al. 2022, in MPT's order).
    """
    power = 1 << (heads - 1).bit_length()
    all_slopes = 2.0 ** (-bias_max * np.arange(1, power + 1) / power)
    ordered = all_slopes if power == heads else np.concatenate([all_slopes[1::2], all_slopes[::2]])
    return ordered[:heads].astype(np.float32)
