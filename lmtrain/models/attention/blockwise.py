"""Exact causal attention in blocks, on any device; memory grows with the length, not its square.

Dao et al. 2022, "FlashAttention": scores are computed for one block of queries and one block of keys at a time and
normalised by a running maximum and sum; the backward pass recomputes them from the saved logarithm of that sum. Blocks
of keys that no query of a block can see, because they are later or outside the window, are skipped.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.attention.attend import MASKED, Options
from lmtrain.models.attention.kernel import Kernel, all_but
from lmtrain.models.layers.remat import SAVED_ATTENTION

DEFAULT_BLOCK_SIZE = 512

# Part of the names of the backward pass, which loops over blocks of keys and, inside, of queries.
_OF_KEYS = "of_keys"


class _Static(NamedTuple):
    """Static arguments: block size, number of keys that a query sees, the cap of scores."""

    block: int
    window: int | None
    cap: float | None


class _Where(NamedTuple):
    """Arrays without gradients: position of the first query, segments of queries and of keys, [B, S] and [B, T], and
    ALiBi slopes of [K, G] heads or None."""

    first: jax.Array | int
    queries: jax.Array
    keys: jax.Array
    slopes: jax.Array | None


def blockwise(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` of a sequence to itself, without dropout. -> [B, H, S, C]"""
    kind = q_BHSC.dtype
    if options.upcast:
        q_BHSC, k_BKSC = q_BHSC.astype(jnp.float32), k_BKSC.astype(jnp.float32)
    batch, heads, length, head_dim = q_BHSC.shape
    kv_heads, keys = k_BKSC.shape[1:3]
    groups = heads // kv_heads
    block = min(options.block_size or DEFAULT_BLOCK_SIZE, length)

    def pad(x: jax.Array, axis: int) -> jax.Array:
        """Padding of the last block comes after all queries, so that none sees it."""
        return jnp.pad(x, [(0, -x.shape[axis] % block if axis == number else 0) for number in range(x.ndim)])

    segments = jnp.zeros((batch, keys), jnp.int32) if options.segments is None else options.segments
    own = options.of_queries(segments, length)
    slopes = None if options.slopes is None else jnp.asarray(options.slopes).reshape(kv_heads, groups)
    first = 0 if options.first_query is None else options.first_query
    where = _Where(first, pad(own, 1), pad(segments, 1), slopes)
    q = pad((q_BHSC * scale).astype(q_BHSC.dtype), 2).reshape(batch, kv_heads, groups, -1, head_dim)
    sinks = None if options.sinks is None else options.sinks.astype(jnp.float32).reshape(kv_heads, groups)
    mixed = _attend(q, pad(k_BKSC, 2), pad(v_BKSC, 2), sinks, where, _Static(block, options.window, options.cap))
    return mixed.reshape(batch, heads, q.shape[3], -1)[:, :, :length].astype(kind)


def mean_blocks(length: int, block_size: int | None, window: int | None) -> float:
    """Mean number of blocks of keys computed per block of queries, in the forward and in the backward pass."""
    block = min(block_size or DEFAULT_BLOCK_SIZE, length)
    blocks = -(-length // block)
    first = (0 if window is None else max(i * block - window + 1, 0) // block for i in range(blocks))
    return sum(i + 1 - begin for i, begin in enumerate(first)) / blocks


def mean_trips(op_name: str, length: int, block_size: int | None, window: int | None, groups: int) -> float:
    """`mean_blocks` of the loop with this name: with several groups, queries are one of 2 * groups parts."""
    mean = mean_blocks(length, block_size, window)
    return mean / (2 * groups) if groups > 1 and _OF_KEYS in op_name else mean


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, where: _Where, static: _Static
) -> jax.Array:
    return _forward(q, k, v, sinks, where, static)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, where: _Where, static: _Static
) -> tuple[jax.Array, Any]:
    """The mixed values [B, K, G, S, C], and the residuals for the backward pass. `sinks` are those of [K, G] heads."""

    def of_queries(_: None, i: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_i = _part(q, i, static)

        def add(j: jax.Array, sums: Any) -> Any:
            highest, total, mixed = sums
            scores = _scores(q_i, _part(k, j, static), where, i, j, static)
            higher = jnp.maximum(highest, scores.max(-1))
            weights = jnp.exp(scores - higher[..., None])
            shrink = jnp.exp(highest - higher)
            more = jnp.einsum(
                "BKGST,BKTC->BKGSC", weights.astype(v.dtype), _part(v, j, static), preferred_element_type=jnp.float32
            )
            return higher, total * shrink + weights.sum(-1), mixed * shrink[..., None] + more

        rows = q_i.shape[:-1]
        begin = jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros((*rows, v.shape[-1]))
        if sinks is not None:  # seen first, with a value of 0
            begin = jnp.broadcast_to(sinks[..., None], rows), jnp.ones(rows), begin[2]
        highest, total, mixed = jax.lax.fori_loop(*_keys_of(i, k.shape[2] // static.block, where, static), add, begin)
        return None, ((mixed / total[..., None]).astype(v.dtype), highest + jnp.log(total))

    blocks = q.shape[3] // static.block
    _, (mixed, log_sum) = jax.lax.scan(of_queries, None, jnp.arange(blocks))
    mixed, log_sum = (checkpoint_name(_join(part), SAVED_ATTENTION) for part in (mixed, log_sum))
    return mixed, (q, k, v, sinks, where, mixed, log_sum)


def _backward(static: _Static, saved: Any, d_mixed: jax.Array) -> tuple[Any, ...]:
    """With p the weights: dv = p^T do, dp = do v^T, ds = p (dp - sum(do o)), dq = ds k, dk = ds^T q. A sink has the
    value 0 and so the gradient -p sum(do o)."""
    q, k, v, sinks, where, mixed, log_sum = saved
    mean = (d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(-1)
    blocks, key_blocks = q.shape[3] // static.block, k.shape[2] // static.block

    def of_keys(d_q: jax.Array, j: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        k_j, v_j = _part(k, j, static), _part(v, j, static)

        def add(i: jax.Array, sums: Any) -> Any:
            d_q, d_k, d_v = sums
            q_i, d_i = _part(q, i, static), _part(d_mixed, i, static)
            scores = _scores(q_i, k_j, where, i, j, static)
            weights = jnp.exp(scores - _part(log_sum, i, static, axis=-1)[..., None])
            d_weights = jnp.einsum("BKGSC,BKTC->BKGST", d_i, v_j, preferred_element_type=jnp.float32)
            d_scores = weights * (d_weights - _part(mean, i, static, axis=-1)[..., None])
            if static.cap is not None:  # the derivative of tanh; hidden scores have weight 0
                d_scores *= 1 - jnp.square(jnp.maximum(scores / static.cap, -1))
            low, wide = d_scores.astype(q.dtype), {"preferred_element_type": jnp.float32}
            d_v = d_v + jnp.einsum("BKGST,BKGSC->BKTC", weights.astype(v.dtype), d_i, **wide)
            d_k = d_k + jnp.einsum("BKGST,BKGSC->BKTC", low, q_i, **wide)
            d_q_i = _part(d_q, i, static) + jnp.einsum("BKGST,BKTC->BKGSC", low, k_j, **wide)
            return jax.lax.dynamic_update_slice_in_dim(d_q, d_q_i, i * static.block, axis=3), d_k, d_v

        begin = d_q, jnp.zeros(k_j.shape, jnp.float32), jnp.zeros(v_j.shape, jnp.float32)
        d_q, d_k, d_v = jax.lax.fori_loop(*_queries_of(j, blocks, where, static), add, begin)
        return d_q, (d_k, d_v)

    with jax.named_scope(_OF_KEYS):
        d_q, (d_k, d_v) = jax.lax.scan(of_keys, jnp.zeros(q.shape, jnp.float32), jnp.arange(key_blocks))
    d_k, d_v = _join(d_k, axis=2).astype(k.dtype), _join(d_v, axis=2).astype(v.dtype)
    d_sinks = None if sinks is None else -(jnp.exp(sinks[..., None] - log_sum) * mean).sum((0, 3))
    return d_q.astype(q.dtype), d_k, d_v, d_sinks, None


_attend.defvjp(_forward, _backward)


def _keys_of(i: jax.Array, blocks: int, where: _Where, static: _Static) -> tuple[jax.Array | int, jax.Array]:
    """The first block of keys that block i of queries sees, and the one after the last."""
    first = where.first + i * static.block
    end = jnp.minimum((first + static.block - 1) // static.block + 1, blocks)
    if static.window is None:
        return 0, end
    return jnp.maximum(first - static.window + 1, 0) // static.block, end


def _queries_of(j: jax.Array, blocks: int, where: _Where, static: _Static) -> tuple[jax.Array, jax.Array | int]:
    """The first block of queries that sees block j of keys, and the one after the last."""
    first = j * static.block - where.first
    begin = jnp.clip(first // static.block, 0, blocks)
    if static.window is None:
        return begin, blocks
    last = first + static.block - 1 + static.window - 1  # the last query that sees the block's last key
    return begin, jnp.clip(last // static.block + 1, 0, blocks)


def _scores(
    q_BKGSC: jax.Array, k_BKTC: jax.Array, where: _Where, i: jax.Array, j: jax.Array, static: _Static
) -> jax.Array:
    """Float32 scores [B, K, G, S, T] of block i of queries and block j of keys."""
    scores = jnp.einsum("BKGSC,BKTC->BKGST", q_BKGSC, k_BKTC, preferred_element_type=jnp.float32)
    if static.cap is not None:
        scores = static.cap * jnp.tanh(scores / static.cap)
    offsets = jnp.arange(static.block)
    apart = (where.first + i * static.block + offsets)[:, None] - (j * static.block + offsets)
    if where.slopes is not None:
        scores -= where.slopes[:, :, None, None] * apart
    seen = apart >= 0
    if static.window is not None:
        seen &= apart < static.window
    own = jax.lax.dynamic_slice_in_dim(where.queries, i * static.block, static.block, axis=1)
    other = jax.lax.dynamic_slice_in_dim(where.keys, j * static.block, static.block, axis=1)
    same = own[:, :, None] == other[:, None, :]
    return jnp.where((seen & same)[:, None, None], scores, MASKED)


def _part(array: jax.Array, block: jax.Array, static: _Static, axis: int = -2) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, block * static.block, static.block, axis=array.ndim + axis)


def _join(parts: jax.Array, axis: int = 3) -> jax.Array:
    """[blocks, ...] -> the blocks concatenated along `axis`."""
    moved = jnp.moveaxis(parts, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


KERNEL = Kernel(
    name="blockwise",
    platform=None,
    features=all_but("dropout"),
    call=blockwise,
    auto_from=4096,
    uses_block_size=True,
    mean_trips=mean_trips,
)
