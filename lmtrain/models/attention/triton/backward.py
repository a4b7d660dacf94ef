"""The backward kernels (FlashAttention-2, algorithm 2), one for keys and values and one for queries.

As separate kernels they need no atomic additions, so that gradients are bitwise reproducible.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.attention.triton.blocks import Inputs, Scores, Sizes, Static, in_three, over_keys


class Upstream(NamedTuple):
    """Per query, [B, H * parts, S]: `log_sum`, and the weighted `mean` of gradients; `d_mixed` [B, H, S, D]."""

    log_sum: Any
    mean: Any
    d_mixed: Any


def d_keys(inputs: Inputs, upstream: Upstream, static: Static) -> tuple[jax.Array, jax.Array]:
    """The gradients of keys, for each part of the values, and of values."""
    batch, kv_heads, keys, _ = inputs.k.shape
    length, rows, sizes = inputs.q.shape[2], static.blocks.dkv_keys, Sizes.of(inputs)
    # here `h` counts parts of key heads; with several parts, each key head has one query head
    of_key = pl.BlockSpec((None, None, rows, sizes.tile), lambda j, h, b: (b, h // sizes.parts, j, 0))
    of_value = pl.BlockSpec((None, None, rows, sizes.part), lambda j, h, b: sizes.mixed_block(b, h, j))
    per_query = pl.BlockSpec((None, sizes.groups, length), lambda j, h, b: (b, h, 0))
    d_k, d_v = static.call(
        functools.partial(_keys_kernel, static=static, sizes=sizes, blocks=length // static.blocks.dkv_queries),
        "attention_d_keys",
        grid=(keys // rows, kv_heads * sizes.parts, batch),
        in_specs=[
            Inputs(
                pl.BlockSpec((None, sizes.groups, length, sizes.tile), lambda j, h, b: (b, h // sizes.parts, 0, 0)),
                of_key,
                of_value,
                *sizes.scalars(sizes.groups),
                pl.BlockSpec((None, length), lambda j, h, b: (b, 0)),
                pl.BlockSpec((None, rows), lambda j, h, b: (b, j)),
                sizes.begin(inputs),
            ),
            Upstream(
                per_query,
                per_query,
                pl.BlockSpec((None, sizes.groups, length, sizes.part), lambda j, h, b: sizes.mixed_block(b, h, 0)),
            ),
        ],
        out_specs=[pl.BlockSpec((None, None, rows, sizes.tile), lambda j, h, b: (b, h, j, 0)), of_value],
        out_shape=[_per_part(inputs.k, sizes), jax.ShapeDtypeStruct(inputs.v.shape, inputs.v.dtype)],
    )(inputs, upstream)
    return d_k, d_v


def _keys_kernel(
    inputs: Inputs, upstream: Upstream, d_k_ref: Any, d_v_ref: Any, *, static: Static, sizes: Sizes, blocks: int
) -> None:
    rows, columns = static.blocks.dkv_keys, static.blocks.dkv_queries
    key, first_query = pl.program_id(0) * rows, inputs.first_query
    k, v, last = sizes.load(inputs.k), sizes.load_values(inputs.v), inputs.last[...]

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
            q, d = sizes.load(inputs.q.at[g, queries, :]), sizes.load_values(upstream.d_mixed.at[g, queries, :])
            s = scores.transposed(plgpu.dot(k, q.T), first_query + i * columns, key, inputs.first[queries], masked)
            weights = jnp.exp2(s - upstream.log_sum[g, queries][None, :])
            d_v = d_v + plgpu.dot(weights.astype(d.dtype), d)
            d_scores = scores.before_cap(weights * (plgpu.dot(v, d.T) - upstream.mean[g, queries][None, :]), s)
            return d_k + plgpu.dot(d_scores.astype(q.dtype), q), d_v

        return in_three(add, begin, whole, partly, end, sums)

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    d_k, d_v = jax.lax.fori_loop(0, sizes.groups, of_head, zeros)
    plgpu.store(d_k_ref, (d_k * inputs.scale[0]).astype(d_k_ref.dtype), mask=sizes.here)
    plgpu.store(d_v_ref, d_v.astype(d_v_ref.dtype), mask=sizes.here_values)


def d_queries(inputs: Inputs, upstream: Upstream, static: Static) -> jax.Array:
    """The gradient of queries, for each part of the values."""
    batch, heads, length, _ = inputs.q.shape
    rows, sizes = static.blocks.dq_queries, Sizes.of(inputs)
    number = length // rows

    def turn(i: Any) -> Any:
        return number - 1 - i  # longest first

    per_query = pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, turn(i)))
    of_mixed = pl.BlockSpec((None, None, rows, sizes.part), lambda i, h, b: sizes.mixed_block(b, h, turn(i)))
    d_q: jax.Array = static.call(
        functools.partial(
            _queries_kernel,
            static=static,
            sizes=sizes,
            number=number,
            key_blocks=inputs.k.shape[2] // static.blocks.dq_keys,
        ),
        "attention_d_queries",
        grid=(number, heads * sizes.parts, batch),
        in_specs=[sizes.by_query(inputs, rows, turn), Upstream(per_query, per_query, of_mixed)],
        out_specs=pl.BlockSpec((None, None, rows, sizes.tile), lambda i, h, b: (b, h, turn(i), 0)),
        out_shape=_per_part(inputs.q, sizes),
    )(inputs._replace(last=None), upstream)
    return d_q


def _queries_kernel(
    inputs: Inputs, upstream: Upstream, d_q_ref: Any, *, static: Static, sizes: Sizes, number: int, key_blocks: int
) -> None:
    rows, columns = static.blocks.dq_queries, static.blocks.dq_keys
    query = inputs.first_query + (number - 1 - pl.program_id(0)) * rows
    q, d = sizes.load(inputs.q), sizes.load_values(upstream.d_mixed)
    first, log_sum, mean = inputs.first[...], upstream.log_sum[...], upstream.mean[...]
    scores = Scores(static, inputs)

    def add(j: Any, d_q: jax.Array, masked: bool) -> jax.Array:
        keys = pl.dslice(j * columns, columns)
        k = sizes.load(inputs.k.at[keys, :])
        s = scores(plgpu.dot(q, k.T), query, j * columns, first, masked)
        d_weights = plgpu.dot(d, sizes.load_values(inputs.v.at[keys, :]).T)
        d_scores = scores.before_cap(jnp.exp2(s - log_sum[:, None]) * (d_weights - mean[:, None]), s)
        return d_q + plgpu.dot(d_scores.astype(k.dtype), k)

    d_q = over_keys(add, query, first, rows, columns, key_blocks, jnp.zeros(q.shape, jnp.float32))
    plgpu.store(d_q_ref, (d_q * inputs.scale[0]).astype(d_q_ref.dtype), mask=sizes.here)


def _per_part(x: jax.Array, sizes: Sizes) -> jax.ShapeDtypeStruct:
    """The shape of the gradients of `x`; with several parts of the values one for each, to be summed in float32."""
    batch, heads, *rest = x.shape
    dtype = x.dtype if sizes.parts == 1 else jnp.dtype(jnp.float32)
    return jax.ShapeDtypeStruct((batch, heads * sizes.parts, *rest), dtype)
