"""Exact causal attention on NVIDIA GPUs, with memory that grows with the length: our own kernels, written in Pallas.

Dao 2023, "FlashAttention-2": scores are computed for one block of queries and one block of keys at a time, in on-chip
memory. The backward pass recomputes them from the saved logarithm of their sum, once for the gradients of keys and
values, once for those of queries.

A query sees a range of positions: from the start of its document, or of the window, to its own. Blocks of keys outside
a block's ranges are skipped, so that packed documents cost the same as separate ones, and blocks entirely inside need
no mask. On devices other than GPUs the kernels are interpreted: slow, and only for tests.

Values much wider than keys (a Backpack's senses) are mixed in parts of 128 columns; each part recomputes the scores.

Of latent attention, the keys of a head and those that all heads share have products of their own.

    B batch  H query heads  K key heads  S positions  C width of queries and keys  D width of values
    R width of the keys of all heads
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.attention.attend import Options, ranges
from lmtrain.models.attention.triton.blocks import (
    LOG2_E,
    MASKED,
    Blocks,
    Inputs,
    Scores,
    Sizes,
    Static,
    add_products,
    blocks_for,
    in_three,
    over_keys,
    products,
)
from lmtrain.models.layers.remat import SAVED_ATTENTION
from lmtrain.sharding.local import device_kind, platform


def mix(inputs: Inputs, static: Static) -> tuple[jax.Array, jax.Array]:
    """The mixed values [B, S, H, D], and the base 2 logarithm of the sum of exponentials, [B, H * parts, S]."""
    batch, length, heads, _ = inputs.q.shape
    sizes, rows = Sizes.of(inputs), static.blocks.queries
    number = length // rows

    def turn(i: Any) -> Any:
        return number - 1 - i  # longest first

    mixed, log_sum = static.call(
        functools.partial(
            _kernel, static=static, sizes=sizes, number=number, key_blocks=inputs.k.shape[1] // static.blocks.keys
        ),
        "attention_forward",
        grid=(number, heads * sizes.parts, batch),
        in_specs=[sizes.by_query(inputs, rows, turn)],
        out_specs=[
            pl.BlockSpec((None, rows, None, sizes.part), lambda i, h, b: sizes.mixed_block(b, h, turn(i))),
            pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, turn(i))),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, length, heads, sizes.value_width * sizes.parts), inputs.q.dtype),
            jax.ShapeDtypeStruct((batch, heads * sizes.parts, length), jnp.float32),
        ],
    )(inputs._replace(last=None))
    return mixed, log_sum


def _kernel(
    inputs: Inputs, mixed_ref: Any, log_sum_ref: Any, *, static: Static, sizes: Sizes, number: int, key_blocks: int
) -> None:
    rows, columns = static.blocks.queries, static.blocks.keys
    query = inputs.first_query + (number - 1 - pl.program_id(0)) * rows
    q, first = sizes.load_queries(inputs.q, slice(None)), inputs.first[...]
    scores = Scores(static, inputs)

    def add(j: Any, sums: Any, masked: bool) -> Any:
        highest, total, mixed = sums
        keys = pl.dslice(j * columns, columns)
        s = scores(products(q, sizes.load_keys(inputs, keys)), query, j * columns, first, masked)
        higher = jnp.maximum(highest, s.max(axis=1))
        weights = jnp.exp2(s - higher[:, None])
        shrink = jnp.exp2(highest - higher)
        v = sizes.load_values(inputs, keys)
        mixed = mixed * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return higher, total * shrink + weights.sum(axis=1), mixed

    zeros = jnp.zeros((rows, sizes.part), jnp.float32)
    begin = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), zeros)
    if static.has_sinks:  # seen first, with a value of 0
        begin = (jnp.full(rows, inputs.sinks[0] * LOG2_E), jnp.ones(rows, jnp.float32), zeros)
    highest, total, mixed = over_keys(add, query, first, rows, columns, key_blocks, begin)
    sizes.mixed.store(mixed_ref, mixed / total[:, None])
    log_sum_ref[...] = highest + jnp.log2(total)


# The backward kernels (FlashAttention-2, algorithm 2), one for keys and values and one for queries.
#
# As separate kernels they need no atomic additions, so that gradients are bitwise reproducible.


class Upstream(NamedTuple):
    """Per query, [B, H * parts, S]: `log_sum`, and the weighted `mean` of gradients; `d_mixed` [B, S, H, D]."""

    log_sum: Any
    mean: Any
    d_mixed: Any


def d_keys(inputs: Inputs, upstream: Upstream, static: Static) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys, for each part of the values, and of values; or of both together, and of the keys of all
    heads for each head."""
    batch, keys, kv_heads, _ = inputs.k.shape
    length, rows, sizes = inputs.q.shape[1], static.blocks.dkv_keys, Sizes.of(inputs)
    # here `h` counts parts of key heads; with several parts, each key head has one query head
    of_key = pl.BlockSpec((None, rows, None, sizes.key_block), lambda j, h, b: (b, j, h // sizes.parts, 0))
    of_value = pl.BlockSpec((None, rows, None, sizes.part), lambda j, h, b: sizes.mixed_block(b, h, j))
    per_query = pl.BlockSpec((None, sizes.groups, length), lambda j, h, b: (b, h, 0))
    if inputs.shared is None:
        second, of_second = jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype), of_value
    else:
        tile = pl.next_power_of_2(sizes.shared)
        second = jax.ShapeDtypeStruct((batch, keys, kv_heads, sizes.shared), inputs.shared.dtype)
        of_second = pl.BlockSpec((None, rows, None, tile), lambda j, h, b: (b, j, h, 0))
    d_k, d_second = static.call(
        functools.partial(_keys_kernel, static=static, sizes=sizes, blocks=length // static.blocks.dkv_queries),
        "attention_d_keys",
        grid=(keys // rows, kv_heads * sizes.parts, batch),
        in_specs=[
            Inputs(
                pl.BlockSpec(
                    (None, length, sizes.groups, sizes.query_block), lambda j, h, b: (b, 0, h // sizes.parts, 0)
                ),
                of_key,
                None if sizes.shared else of_value,
                *sizes.scalars(sizes.groups),
                pl.BlockSpec((None, length), lambda j, h, b: (b, 0)),
                pl.BlockSpec((None, rows), lambda j, h, b: (b, j)),
                sizes.begin(inputs),
                sizes.of_all(rows, lambda j: j),
            ),
            Upstream(
                per_query,
                per_query,
                pl.BlockSpec((None, length, sizes.groups, sizes.part), lambda j, h, b: sizes.mixed_block(b, h, 0)),
            ),
        ],
        out_specs=[pl.BlockSpec((None, rows, None, sizes.key_block), lambda j, h, b: (b, j, h, 0)), of_second],
        out_shape=[_per_part(inputs.k, sizes), second],
    )(inputs, upstream)
    return d_k, d_second


def _keys_kernel(
    inputs: Inputs, upstream: Upstream, d_k_ref: Any, d_second_ref: Any, *, static: Static, sizes: Sizes, blocks: int
) -> None:
    rows, columns = static.blocks.dkv_keys, static.blocks.dkv_queries
    key, first_query = pl.program_id(0) * rows, inputs.first_query
    k, v = sizes.load_keys(inputs, slice(None)), sizes.load_values(inputs, slice(None))
    last = inputs.last[...]

    def queries_before(position: Any) -> Any:
        return jnp.maximum(position - first_query, 0)

    # blocks of queries from the diagonal on: those in between see all keys, the last ones only keys of their document
    end = jnp.minimum(pl.cdiv(queries_before(jnp.max(last) + 1), columns), blocks)
    begin = jnp.minimum(queries_before(key) // columns, end)
    whole = jnp.clip(pl.cdiv(queries_before(key + rows - 1), columns), begin, end)
    partly = jnp.clip(queries_before(jnp.min(last) + 1) // columns, whole, end)

    def of_head(g: Any, sums: Any) -> Any:
        scores = Scores(static, inputs, g)

        def add(i: Any, sums: Any, masked: bool) -> Any:
            d_k, d_v = sums
            queries = pl.dslice(i * columns, columns)
            q, d = sizes.load_queries(inputs.q, queries, g), sizes.mixed.load(upstream.d_mixed, queries, g)
            s = scores.transposed(products(k, q), first_query + i * columns, key, inputs.first[queries], masked)
            weights = jnp.exp2(s - upstream.log_sum[g, queries][None, :])
            d_v = d_v + plgpu.dot(weights.astype(d.dtype), d)
            d_scores = scores.before_cap(weights * (plgpu.dot(v, d.T) - upstream.mean[g, queries][None, :]), s)
            return add_products(d_k, d_scores, q), d_v

        return in_three(add, begin, whole, partly, end, sums)

    zeros = tuple(jnp.zeros(part.shape, jnp.float32) for part in k), jnp.zeros(v.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, sizes.groups, of_head, zeros)
    refs = (d_k_ref, *([d_second_ref] if sizes.shared else []))
    for columns_of, ref, d in zip(sizes.keys, refs, d_k, strict=True):
        columns_of.store(ref, d * inputs.scale[0])
    sizes.values.store(d_k_ref if sizes.shared else d_second_ref, d_v)


def d_queries(inputs: Inputs, upstream: Upstream, static: Static) -> jax.Array:
    """The gradient of queries, for each part of the values."""
    batch, length, heads, _ = inputs.q.shape
    rows, sizes = static.blocks.dq_queries, Sizes.of(inputs)
    number = length // rows

    def turn(i: Any) -> Any:
        return number - 1 - i  # longest first

    per_query = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, turn(i)))
    of_mixed = pl.BlockSpec((None, rows, None, sizes.part), lambda i, h, b: sizes.mixed_block(b, h, turn(i)))
    d_q: jax.Array = static.call(
        functools.partial(
            _queries_kernel,
            static=static,
            sizes=sizes,
            number=number,
            key_blocks=inputs.k.shape[1] // static.blocks.dq_keys,
        ),
        "attention_d_queries",
        grid=(number, heads * sizes.parts, batch),
        in_specs=[sizes.by_query(inputs, rows, turn), Upstream(per_query, per_query, of_mixed)],
        out_specs=pl.BlockSpec((None, rows, None, sizes.query_block), lambda i, h, b: (b, turn(i), h, 0)),
        out_shape=_per_part(inputs.q, sizes),
    )(inputs._replace(last=None), upstream)
    return d_q


def _queries_kernel(
    inputs: Inputs, upstream: Upstream, d_q_ref: Any, *, static: Static, sizes: Sizes, number: int, key_blocks: int
) -> None:
    rows, columns = static.blocks.dq_queries, static.blocks.dq_keys
    query = inputs.first_query + (number - 1 - pl.program_id(0)) * rows
    q, d = sizes.load_queries(inputs.q, slice(None)), sizes.mixed.load(upstream.d_mixed, slice(None))
    first, log_sum, mean = inputs.first[...], upstream.log_sum[...], upstream.mean[...]
    scores = Scores(static, inputs)

    def add(j: Any, d_q: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
        keys = pl.dslice(j * columns, columns)
        k = sizes.load_keys(inputs, keys)
        s = scores(products(q, k), query, j * columns, first, masked)
        d_weights = plgpu.dot(d, sizes.load_values(inputs, keys).T)
        d_scores = scores.before_cap(jnp.exp2(s - log_sum[:, None]) * (d_weights - mean[:, None]), s)
        return add_products(d_q, d_scores, k)

    zeros = tuple(jnp.zeros(part.shape, jnp.float32) for part in q)
    d_q = over_keys(add, query, first, rows, columns, key_blocks, zeros)
    for columns_of, each in zip(sizes.queries, d_q, strict=True):
        columns_of.store(d_q_ref, each * inputs.scale[0])


def _per_part(x: jax.Array, sizes: Sizes) -> jax.ShapeDtypeStruct:
    """The shape of the gradients of `x`; with several parts of the values one for each, to be summed in float32."""
    *leading, heads, width = x.shape
    dtype = x.dtype if sizes.parts == 1 else jnp.dtype(jnp.float32)
    return jax.ShapeDtypeStruct((*leading, heads * sizes.parts, width), dtype)


def attend(
    q_BHSC: jax.Array, k_BKSC: jax.Array, v_BKSC: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` without dropout, in 16 bits. -> [B, H, S, D]

    Equal neighbours in `segments` are one document. Scores are float32, scaled after the product. Values of more than
    256 columns have a multiple of 128, and a key head for each query head.
    """
    blocks = blocks_for(q_BHSC.shape[-1], v_BKSC.shape[-1], device_kind())
    return _mixed(q_BHSC, k_BKSC, v_BKSC, None, scale, options, blocks)


def attend_latent(
    q_BHSC: jax.Array, kv_BHSE: jax.Array, shared_B1SR: jax.Array, scale: jax.Array | float, options: Options
) -> jax.Array:
    """`attend` of latent attention, as in `self_attend_latent`; values have 256 columns at most. -> [B, H, S, D]"""
    shared = shared_B1SR.shape[-1]
    width = q_BHSC.shape[-1] - shared
    blocks = blocks_for(width, kv_BHSE.shape[-1] - width, device_kind(), shared)
    return _mixed(q_BHSC, kv_BHSE, None, shared_B1SR[:, 0], scale, options, blocks)


def _mixed(
    q_BHSC: jax.Array,
    k_BKSC: jax.Array,
    v_BKSC: jax.Array | None,
    shared_BSR: jax.Array | None,
    scale: jax.Array | float,
    options: Options,
    blocks: Blocks,
) -> jax.Array:
    """The arrays of `Inputs` with heads first, which can be a part of the queries, and any length."""
    length = q_BHSC.shape[2]
    static = Static(blocks, options.slopes is not None, options.sinks is not None, options.cap, platform() != "gpu")

    def pad(x: jax.Array, axis: int, **more: Any) -> jax.Array:
        """Padding comes after all queries, so that none sees it."""
        extra = -x.shape[axis] % static.blocks.largest
        return jnp.pad(x, [(0, extra if axis == number else 0) for number in range(x.ndim)], **more)

    # projections return [B, S, H, C], and the compiler drops a transposition and its inverse: nothing is copied
    q, k, v = (None if x is None else pad(x.transpose(0, 2, 1, 3), 1) for x in (q_BHSC, k_BKSC, v_BKSC))
    assert q is not None
    assert k is not None
    shared = None if shared_BSR is None else pad(shared_BSR, 1)
    segments = jnp.zeros((len(k), k_BKSC.shape[2]), jnp.int32) if options.segments is None else options.segments
    first, last = ranges(pad(segments, 1, constant_values=-1), options.window)
    begin = None
    if options.first_query is not None:
        begin = options.first_query.reshape(1)
        # queries after the last key are padding
        first = options.of_queries(jnp.pad(first, ((0, 0), (0, q.shape[1]))), q.shape[1])
    scales = jnp.asarray(scale, jnp.float32).reshape(1)
    slopes, sinks = (
        jnp.zeros(q.shape[2], jnp.float32) if x is None else jnp.asarray(x, jnp.float32)
        for x in (options.slopes, options.sinks)
    )
    mixed_BSHD = _attend(Inputs(q, k, v, scales, slopes, sinks, first, last, begin, shared), static)[:, :length]
    return mixed_BSHD.transpose(0, 2, 1, 3)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _attend(inputs: Inputs, static: Static) -> jax.Array:
    return mix(inputs, static)[0]


def _forward(inputs: Inputs, static: Static) -> tuple[jax.Array, Any]:
    mixed, log_sum = (checkpoint_name(part, SAVED_ATTENTION) for part in mix(inputs, static))
    return mixed, (inputs, mixed, log_sum)


def _backward(static: Static, saved: Any, d_mixed: jax.Array) -> tuple[Inputs]:
    """With p the weights: dv = p^T do, dp = do v^T, ds = p (dp - sum(do o)), dq = scale ds k, dk = scale ds^T q. A sink
    has the value 0 and so the gradient -p sum(do o)."""
    inputs, mixed, log_sum = saved
    q, k = inputs.q, inputs.k
    parts = Sizes.of(inputs).parts
    products = d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32)
    # for each part of the values: only one part uses their sum, since scores are the same for all parts
    mean = jnp.repeat(products.sum(-1).transpose(0, 2, 1), parts, axis=1) / parts
    upstream = Upstream(log_sum, mean, d_mixed.astype(q.dtype))
    d_k, d_second = d_keys(inputs, upstream, static)
    d_q = d_queries(inputs, upstream, static)
    if parts > 1:
        d_q, d_k = (d.reshape(*x.shape[:3], parts, x.shape[3]).sum(3).astype(x.dtype) for d, x in ((d_q, q), (d_k, k)))
    d_sinks = None
    if static.has_sinks:
        weights = jnp.exp2(jnp.repeat(inputs.sinks * LOG2_E, parts)[:, None] - log_sum)
        d_sinks = -(weights * mean).sum((0, 2)).reshape(-1, parts).sum(1)
    rest = (None, None, d_sinks, None, None, None)
    if inputs.shared is None:
        return (Inputs(d_q, d_k, d_second, *rest),)
    return (Inputs(d_q, d_k, None, *rest, d_second.sum(2, dtype=jnp.float32).astype(d_second.dtype)),)


_attend.defvjp(_forward, _backward)
