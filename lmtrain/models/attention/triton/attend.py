"""Exact causal attention on NVIDIA GPUs, with memory that grows with the length: our own kernels, written in Pallas.

Dao 2023, "FlashAttention-2": scores are computed for one block of queries and one block of keys at a time, in on-chip
memory. The backward pass recomputes them from the saved logarithm of their sum, once for the gradients of keys and
values, once for those of queries.

A query sees a range of positions: from the start of its document, or of the window, to its own. Blocks of keys outside
a block's ranges are skipped, so that packed documents cost the same as separate ones, and blocks entirely inside need
no mask. On devices other than GPUs the kernels are interpreted: slow, and only for tests.

Values much wider than keys (a Backpack's senses) are mixed in parts of 128 columns; each part recomputes the scores.

    B batch  H query heads  K key heads  S positions  C width of queries and keys  D width of values
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.attention.options import Options
from lmtrain.models.attention.triton.backward import Upstream, d_keys, d_queries
from lmtrain.models.attention.triton.blocks import Inputs, Sizes, Static, blocks_for
from lmtrain.models.attention.triton.forward import mix
from lmtrain.models.layers.remat import SAVED_ATTENTION
from lmtrain.sharding.local import device_kind, platform


def attend(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` without dropout, in 16 bits. -> [B, H, S, D]

    Equal neighbours in `segments` are one document. Scores are float32, scaled after the product. Values of more than
    256 columns have a multiple of 128, and a key head for each query head.
    """
    length, width = q_BHSC.shape[2:]
    blocks = blocks_for(width, v_BKSC.shape[-1], device_kind())
    static = Static(blocks, options.slopes is not None, options.cap, platform() != "gpu")

    def pad(x: jax.Array, axis: int, **more: Any) -> jax.Array:
        """Padding comes after all queries, so that none sees it."""
        extra = -x.shape[axis] % static.blocks.largest
        return jnp.pad(x, [(0, extra if axis == number else 0) for number in range(x.ndim)], **more)

    q, k, v = (pad(x, 2) for x in (q_BHSC, k_BKSC, v_BKSC))
    segments = jnp.zeros((len(k), k_BKSC.shape[2]), jnp.int32) if options.segments is None else options.segments
    first, last = _ranges(pad(segments, 1, constant_values=-1), options.window)
    begin = None
    if options.first_query is not None:
        begin = options.first_query.reshape(1)
        # queries after the last key are padding
        first = options.of_queries(jnp.pad(first, ((0, 0), (0, q.shape[2]))), q.shape[2])
    scales = jnp.asarray(scale, jnp.float32).reshape(1)
    slopes = jnp.zeros(q.shape[1], jnp.float32) if options.slopes is None else jnp.asarray(options.slopes)
    return _attend(Inputs(q, k, v, scales, slopes, first, last, begin), static)[:, :, :length]


def _ranges(segments_BS: jax.Array, window: int | None) -> tuple[jax.Array, jax.Array]:
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Inputs, static: Static) -> jax.Array:
    return mix(inputs, static)[0]


def _forward(inputs: Inputs, static: Static) -> tuple[jax.Array, Any]:
    mixed, log_sum = (checkpoint_name(part, SAVED_ATTENTION) for part in mix(inputs, static))
    return mixed, (inputs, mixed, log_sum)


def _backward(static: Static, saved: Any, d_mixed: jax.Array) -> tuple[Inputs]:
    """With p the weights: dv = p^T do, dp = do v^T, ds = p (dp - sum(do o)), dq = scale ds k, dk = scale ds^T q."""
    inputs, mixed, log_sum = saved
    q, k = inputs.q, inputs.k
    parts = Sizes.of(inputs).parts
    products = d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32)
    # for each part of the values: only one part uses their sum, since scores are the same for all parts
    mean = jnp.repeat(products.sum(-1), parts, axis=1) / parts
    upstream = Upstream(log_sum, mean, d_mixed.astype(q.dtype))
    d_k, d_v = d_keys(inputs, upstream, static)
    d_q = d_queries(inputs, upstream, static)
    if parts > 1:
        d_q, d_k = (
            d.reshape(*x.shape[:2], parts, *x.shape[2:]).sum(2).astype(x.dtype) for d, x in ((d_q, q), (d_k, k))
        )
    return (Inputs(d_q, d_k, d_v, None, None, None, None, None),)


_attend.defvjp(_forward, _backward)
