"""The forward kernel: each block of queries loops over blocks of keys (FlashAttention-2, algorithm 1)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.attention.triton.blocks import MASKED, Inputs, Scores, Sizes, Static, over_keys


def mix(inputs: Inputs, static: Static) -> tuple[jax.Array, jax.Array]:
    """The mixed values [B, H, S, D], and the base 2 logarithm of the sum of exponentials, [B, H * parts, S]."""
    batch, heads, length, _ = inputs.q.shape
    sizes, rows = Sizes.of(inputs), static.blocks.queries
    number = length // rows

    def turn(i: Any) -> Any:
        return number - 1 - i  # longest first

    mixed, log_sum = static.call(
        functools.partial(
            _kernel, static=static, sizes=sizes, number=number, key_blocks=inputs.k.shape[2] // static.blocks.keys
        ),
        "attention_forward",
        grid=(number, heads * sizes.parts, batch),
        in_specs=[sizes.by_query(inputs, rows, turn)],
        out_specs=[
            pl.BlockSpec((None, None, rows, sizes.part), lambda i, h, b: sizes.mixed_block(b, h, turn(i))),
            pl.BlockSpec((None, None, rows), lambda i, h, b: (b, h, turn(i))),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, length, inputs.v.shape[-1]), inputs.q.dtype),
            jax.ShapeDtypeStruct((batch, heads * sizes.parts, length), jnp.float32),
        ],
    )(inputs._replace(last=None))
    return mixed, log_sum


def _kernel(
    inputs: Inputs, mixed_ref: Any, log_sum_ref: Any, *, static: Static, sizes: Sizes, number: int, key_blocks: int
) -> None:
    rows, columns = static.blocks.queries, static.blocks.keys
    query = inputs.first_query + (number - 1 - pl.program_id(0)) * rows
    q, first = sizes.load(inputs.q), inputs.first[...]
    scores = Scores(static, inputs)

    def add(j: Any, sums: Any, masked: bool) -> Any:
        highest, total, mixed = sums
        keys = pl.dslice(j * columns, columns)
        s = scores(plgpu.dot(q, sizes.load(inputs.k.at[keys, :]).T), query, j * columns, first, masked)
        higher = jnp.maximum(highest, s.max(axis=1))
        weights = jnp.exp2(s - higher[:, None])
        shrink = jnp.exp2(highest - higher)
        v = sizes.load_values(inputs.v.at[keys, :])
        mixed = mixed * shrink[:, None] + plgpu.dot(weights.astype(v.dtype), v)
        return higher, total * shrink + weights.sum(axis=1), mixed

    zeros = jnp.zeros((rows, sizes.part), jnp.float32)
    begin = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), zeros)
    highest, total, mixed = over_keys(add, query, first, rows, columns, key_blocks, begin)
    plgpu.store(mixed_ref, (mixed / total[:, None]).astype(mixed_ref.dtype), mask=sizes.here_values)
    log_sum_ref[...] = highest + jnp.log2(total)
