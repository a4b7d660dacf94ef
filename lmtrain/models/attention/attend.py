"""Causal attention by the plain formula, softmax(q k^T * scale + bias) v; its options, and the slopes of ALiBi."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.sharding.local import flat

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
    cap: float | None = None,
    slopes: np.ndarray | jax.Array | None = None,
    key_at: jax.Array | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Each query sees the keys up to its own position. -> [B, H, S, C]

    Query s is at position `first_query + s`, key t at t or `key_at[..., t]`; `first_query` is a scalar, or [B], and
    `key_at` [T], or [B, T], where negative positions are no keys. With fewer key heads than query heads, key head k
    serves the H / K query heads from k H / K on. With a `window`, a query sees at most `window` keys. With `segments`,
    those of the queries [B, S] and of the keys [B, T], it sees only keys of its own segment. With a `cap`, scores are
    cap * tanh(scores / cap). With `slopes` [H], scores grow by slope * (key position - query position) (ALiBi, Press et
    al. 2022). With `sinks` [H], the softmax of each head has one more score, of a value of 0 (gpt-oss), so that the
    weights of what a query sees have a sum below 1. Softmax runs in float32; with `upcast` the scores do too. `drop` is
    applied to the attention weights.
    """
    if upcast:
        q_BHSC, k_BKTC = q_BHSC.astype(jnp.float32), k_BKTC.astype(jnp.float32)
    batch, heads, queries, head_dim = q_BHSC.shape
    kv_heads, keys = k_BKTC.shape[1:3]
    groups = heads // kv_heads
    # the query heads of one key head form one longer sequence, so that keys need not be copied
    q_BKSC = q_BHSC.reshape(batch, kv_heads, groups * queries, head_dim)
    scores = jnp.einsum("BKSC,BKTC->BKST", q_BKSC, k_BKTC).astype(jnp.float32) * scale
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    query_at = first_query + jnp.arange(queries)[:, None]
    if jnp.ndim(first_query):  # [B, 1, S, 1]
        query_at = jnp.reshape(first_query, (-1, 1, 1, 1)) + jnp.arange(queries)[:, None]
    if key_at is not None and key_at.ndim == 2:  # [B, 1, 1, T]
        key_at = key_at[:, None, None]
    exists = None if key_at is None else key_at >= 0
    key_at = jnp.arange(keys) if key_at is None else key_at
    if slopes is not None:
        distance = jnp.expand_dims(key_at - query_at, -3)  # [1, S, T] or [B, 1, 1, S, T]
        bias = slopes.reshape(kv_heads, groups, 1, 1) * distance
        scores += bias.reshape(*bias.shape[:-4], kv_heads, groups * queries, keys)
    seen = key_at <= query_at
    if exists is not None:
        seen &= exists
    if window is not None:
        seen &= key_at > query_at - window
    if segments is not None:
        seen &= segments[0][:, None, :, None] == segments[1][:, None, None, :]
    if groups > 1:
        seen = jnp.concatenate([seen] * groups, axis=-2)
    scores = jnp.where(seen, scores, MASKED)
    if sinks is not None:
        of_rows = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, groups), queries, axis=1)
        scores = jnp.append(scores, jnp.broadcast_to(of_rows[..., None], (*scores.shape[:-1], 1)), axis=-1)
    weights = jax.nn.softmax(flat(scores), axis=-1).reshape(scores.shape).astype(v_BKTC.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    if drop is not None:
        weights = drop(weights)
    return jnp.einsum("BKST,BKTC->BKSC", weights, v_BKTC).reshape(*q_BHSC.shape[:3], v_BKTC.shape[-1])


# The collection of variables with the highest score of each head in a batch, and the name in it.
SCORES, HIGHEST = "attention_scores", "highest"
_QUERIES_AT_ONCE = 512


def highest_scores(
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    scale: jax.Array | float,
    window: int | None = None,
    segments_BS: jax.Array | None = None,
) -> jax.Array:
    """The highest score of each head between a query and a key that it sees, before a cap and ALiBi. -> float32 [H]

    Computed in blocks of queries by the plain formula, since no kernel of attention returns it: a quarter more FLOPs of
    attention in the forward pass, and the scores once through memory.
    """
    q_BHSC, k_BKSC = jax.lax.stop_gradient((q_BHSC, k_BKSC))
    batch, heads, length, width = q_BHSC.shape
    kv_heads = k_BKSC.shape[1]
    size = max(part for part in range(1, min(length, _QUERIES_AT_ONCE) + 1) if length % part == 0)
    q_BKGSC = q_BHSC.reshape(batch, kv_heads, heads // kv_heads, length, width)

    def block(highest_KG: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        q = jax.lax.dynamic_slice_in_dim(q_BKGSC, start, size, 3)
        scores = jnp.einsum("BKGSC,BKTC->BKGST", q, k_BKSC)  # in 16 bits, of which the highest is exact
        query_at, key_at = start + jnp.arange(size)[:, None], jnp.arange(length)
        seen = key_at <= query_at
        if window is not None:
            seen &= key_at > query_at - window
        if segments_BS is not None:
            own = jax.lax.dynamic_slice_in_dim(segments_BS, start, size, 1)
            seen = seen & (own[:, None, None, :, None] == segments_BS[:, None, None, None, :])
        return jnp.maximum(highest_KG, jnp.where(seen, scores, MASKED).max((0, 3, 4))), None

    first = jnp.full((kv_heads, heads // kv_heads), MASKED, q_BHSC.dtype)
    highest_KG, _ = jax.lax.scan(block, first, jnp.arange(0, length, size))
    return highest_KG.reshape(heads).astype(jnp.float32) * scale


def alibi_slopes(heads: int, bias_max: float) -> np.ndarray:
    """2^(-bias_max m / n) for m = 1..n with n heads rounded up to a power of two; float32 [heads].

    If n is greater than the number of heads, every second slope comes first, then those in between, and the first
    `heads` of these are used (Press et al. 2022, in MPT's order).
    """
    power = 1 << (heads - 1).bit_length()
    all_slopes = 2.0 ** (-bias_max * np.arange(1, power + 1) / power)
    ordered = all_slopes if power == heads else np.concatenate([all_slopes[1::2], all_slopes[::2]])
    return ordered[:heads].astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Optional features of attention, as in `attend`: `segments` are those of the keys, [B, T]. Scores with slopes have
    no cap.

    `first_query`, an int32 scalar, is the position of the first query, if queries are only a part of the sequence; None
    if they are all of it. `block_size` in tokens is for kernels that use one.
    """

    upcast: bool = False
    drop: Drop | None = None
    segments: jax.Array | None = None
    window: int | None = None
    cap: float | None = None
    slopes: np.ndarray | jax.Array | None = None
    sinks: jax.Array | None = None
    first_query: jax.Array | None = None
    block_size: int | None = None

    @property
    def features(self) -> dict[str, bool]:
        """Which of the features of `names.FEATURES` that change the result are in use."""
        return {
            "dropout": self.drop is not None,
            "cap": self.cap is not None,
            "alibi": self.slopes is not None,
            "sinks": self.sinks is not None,
            "upcast": self.upcast,
            "segments": self.segments is not None,
            "window": self.window is not None,
            "part": self.first_query is not None,
        }

    def of_queries(self, by_key_BT: jax.Array, length: int) -> jax.Array:
        """The part [B, S] of `length` queries of an array by position."""
        if self.first_query is None:
            return by_key_BT
        return jax.lax.dynamic_slice_in_dim(by_key_BT, self.first_query, length, axis=1)


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
