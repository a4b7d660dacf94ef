"""The gated delta rule as two kernels for TPUs, forward and backward, written in Pallas. Elsewhere they are interpreted:
slow, and only for tests.

The formulas and letters are those of `rule.py`. A program has a chunk of one key head and its value heads; the states
stay in the memory of the core from chunk to chunk. The forward kernel saves what the backward kernel cannot compute
again without the chunks before it, the states, and what is dear, the inverse. The backward kernel goes through the
chunks from the last one on, with the gradient of the state in memory. With `new = T w`, w = beta (v - exp(G) k S), the
gradient of the inverse needs no product with its own: that of A is minus the lower part of (T^T d_new) new^T.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmtrain.models.gated_delta.config import CHUNK
from lmtrain.sharding.local import platform

# An exponent whose exponential is 0.
_NOTHING = -1e30


class Sizes(NamedTuple):
    """Positions of a chunk, chunks, key heads, value heads of each, widths of keys and values."""

    chunk: int
    chunks: int
    keys: int
    repeats: int
    width: int
    values: int


def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, starts: Any, state: Any, chunk: int) -> tuple[jax.Array, jax.Array]:
    """See `gated_delta_rule`; the number of positions is a multiple of `chunk`."""
    batch, length, keys, width = k.shape
    heads, values = v.shape[2:]
    sizes = Sizes(chunk, length // chunk, keys, heads // keys, width, values)
    decay = jnp.cumsum(_rows(g, sizes), -1)
    documents = jnp.cumsum(starts.reshape(batch, -1, 1, chunk), -1, dtype=jnp.int32)
    states = state.reshape(batch, keys, sizes.repeats, width, values)
    flat = (x.reshape(batch, length, -1) for x in (q, k, v))
    out, states = _rule(sizes, *flat, decay, _rows(beta, sizes), documents, states)
    return out.reshape(v.shape), states.reshape(state.shape)


def _rows(x_BTH: jax.Array, sizes: Sizes) -> jax.Array:
    """[B, T, H] -> [B, K, N, R, L], as rows of positions."""
    x = x_BTH.reshape(len(x_BTH), sizes.chunks, sizes.chunk, sizes.keys, sizes.repeats)
    return x.transpose(0, 3, 1, 4, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(sizes: Sizes, *inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs [B, T, H E] and the last states."""
    out, states = _forward(sizes, inputs, saves=False)
    return out, states


def _save(sizes: Sizes, *inputs: jax.Array) -> tuple[Any, Any]:
    out, states, *saved = _forward(sizes, inputs, saves=True)
    return (out, states), (*inputs[:6], *saved)


def _specs(sizes: Sizes, is_reversed: bool) -> dict[str, pl.BlockSpec]:
    """The blocks of a program's arrays."""
    chunk, chunks, _, repeats, width, values = sizes

    def at(number: Any) -> Any:
        return chunks - 1 - number if is_reversed else number

    def tokens(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, chunk, columns), lambda b, h, c: (b, at(c), h))

    def of_chunk(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, 1, *shape), lambda b, h, c: (b, h, at(c), *(0 for _ in shape)))

    return {
        "keys": tokens(width),
        "values": tokens(repeats * values),
        "rows": of_chunk(repeats, chunk),
        "documents": pl.BlockSpec((1, 1, 1, chunk), lambda b, h, c: (b, at(c), 0, 0)),
        "state": pl.BlockSpec((1, 1, repeats, width, values), lambda b, h, c: (b, h, 0, 0, 0)),
        "states": of_chunk(repeats, width, values),
        "inverses": of_chunk(repeats, chunk, chunk),
    }


def _call(kernel: Any, name: str, sizes: Sizes, batch: int, ins: list[Any], outs: list[Any], shapes: list[Any]) -> Any:
    scratch = pltpu.VMEM((sizes.repeats, sizes.width, sizes.values), jnp.float32)
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(batch, sizes.keys, sizes.chunks),
        in_specs=ins,
        out_specs=outs,
        out_shape=shapes,
        scratch_shapes=[scratch],
        interpret=platform() != "tpu",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
    )


def _forward(sizes: Sizes, inputs: tuple[jax.Array, ...], saves: bool) -> Any:
    q, _, v, *_, states = inputs
    like, spec, batch = jax.ShapeDtypeStruct, _specs(sizes, False), len(q)
    lead = batch, sizes.keys, sizes.chunks, sizes.repeats
    ins = [spec[name] for name in ("keys", "keys", "values", "rows", "rows", "documents", "state")]
    outs, shapes = [spec["values"], spec["state"]], [like(v.shape, v.dtype), like(states.shape, jnp.float32)]
    if saves:
        outs += [spec["states"], spec["inverses"]]
        shapes += [like((*lead, sizes.width, sizes.values), v.dtype), like((*lead, sizes.chunk, sizes.chunk), v.dtype)]
    kernel = functools.partial(_forward_kernel, sizes=sizes)
    return _call(kernel, "gated_delta_forward", sizes, batch, ins, outs, shapes)(*inputs)


class _Gates(NamedTuple):
    """Of a value head's chunk: decays between positions [L, L], from the state and to it [L, 1], of the state [1, 1]."""

    between: jax.Array
    from_state: jax.Array
    to_state: jax.Array
    kept: jax.Array


def _column(row: jax.Array) -> jax.Array:
    """[1, L] -> [L, 1]"""
    return jnp.broadcast_to(row, (row.shape[1], row.shape[1])).T[:, :1]


def _dot(x: jax.Array, y: jax.Array, sides: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product over these dimensions, exact for float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((sides[0],), (sides[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _gates(decay: jax.Array, documents: jax.Array, document_column: jax.Array) -> _Gates:
    """From rows [1, L], and the documents as a column, too."""
    size = decay.shape[1]
    column, last, of_last = _column(decay), decay[:, size - 1 :], documents[:, size - 1 :]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    meet = (document_column == documents) & (i >= j)
    return _Gates(
        jnp.exp(jnp.where(meet, column - decay, _NOTHING)),
        jnp.exp(jnp.where(document_column == 0, column, _NOTHING)),
        jnp.exp(jnp.where(document_column == of_last, last - column, _NOTHING)),
        jnp.exp(jnp.where(of_last == 0, last, _NOTHING)),
    )


def _inverse(a: jax.Array, dtype: Any) -> jax.Array:
    """(I + a)^-1; see `rule.unit_inverse`. For 16-bit operands elsewhere, in three products of 16 bits."""
    size = len(a)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    inverse = jnp.where(i == j, 1.0, 0.0) - jnp.where((i ^ j) == 1, a, 0.0)
    level = 1
    while (2 << (level - 1)) < size:
        join = jnp.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level)), a, 0.0)
        inverse = inverse - _product(_product(inverse, join, dtype), inverse, dtype)
        level += 1
    return inverse


def _product(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.float32:
        return _dot(x, y)
    (x_high, x_low), (y_high, y_low) = _parts(x, dtype), _parts(y, dtype)
    return _dot(x_high, y_high) + (_dot(x_high, y_low) + _dot(x_low, y_high))


def _parts(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    high = x.astype(dtype)
    return high, (x - high.astype(jnp.float32)).astype(dtype)


def _forward_kernel(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, documents: Any, first: Any, out: Any, last: Any, *rest: Any,
    sizes: Sizes,
) -> None:  # fmt: skip
    *saved, states = rest

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        states[...] = first[0, 0]

    dtype, chunk = v.dtype, sizes.chunk
    keys, documents_row = k[0], documents[0, 0]
    document_column = _column(documents_row)
    both = jnp.concatenate([keys, q[0]], axis=0)
    products = _dot(both, keys, (1, 1))
    kk, qk = products[:chunk], products[chunk:]
    below = jax.lax.broadcasted_iota(jnp.int32, kk.shape, 0) > jax.lax.broadcasted_iota(jnp.int32, kk.shape, 1)
    for r in range(sizes.repeats):
        gates = _gates(decay[0, 0, 0, r : r + 1], documents_row, document_column)
        strength = _column(beta[0, 0, 0, r : r + 1])
        inverse = _inverse(jnp.where(below, kk * gates.between * strength, 0.0), dtype).astype(dtype)
        state = states[r]
        read = _dot(both, state.astype(dtype))
        columns = slice(r * sizes.values, (r + 1) * sizes.values)
        wanted = strength * (v[0, :, columns].astype(jnp.float32) - gates.from_state * read[:chunk])
        new = _dot(inverse, wanted.astype(dtype))
        within = _dot((qk * gates.between).astype(dtype), new.astype(dtype))
        out[0, :, columns] = (gates.from_state * read[chunk:] + within).astype(out.dtype)
        if saved:
            saved[0][0, 0, 0, r], saved[1][0, 0, 0, r] = state.astype(dtype), inverse
        states[r] = state * gates.kept + _dot(keys, (new * gates.to_state).astype(dtype), (0, 0))

    @pl.when(pl.program_id(2) == sizes.chunks - 1)
    def _() -> None:
        last[0, 0] = states[...]


def _backward(sizes: Sizes, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, decay, beta, documents, states, inverses = saved
    d_out, d_last = cotangents
    like, spec, batch = jax.ShapeDtypeStruct, _specs(sizes, True), len(q)
    ins = ["keys", "keys", "values", "rows", "rows", "documents", "states", "inverses", "values", "state"]
    outs = ["keys", "keys", "values", "rows", "rows", "state"]
    shapes = [like(x.shape, x.dtype) for x in (q, k, v, decay, beta, d_last)]
    kernel = functools.partial(_backward_kernel, sizes=sizes)
    call = _call(
        kernel,
        "gated_delta_backward",
        sizes,
        batch,
        [spec[name] for name in ins],
        [spec[name] for name in outs],
        shapes,
    )
    d_q, d_k, d_v, d_decay, d_beta, d_first = call(*saved, d_out.astype(v.dtype), d_last)
    return d_q, d_k, d_v, d_decay, d_beta, None, d_first


def _row_sums(x: jax.Array) -> jax.Array:
    """The sums over the last dimension, as a row [1, L]."""
    ones = jnp.ones((8, x.shape[1]), jnp.float32)
    return _dot(ones, x, (1, 1))[:1]


def _backward_kernel(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, documents: Any, saved_states: Any, inverses: Any, d_out: Any,
    d_last: Any, d_q: Any, d_k: Any, d_v: Any, d_decay: Any, d_beta: Any, d_first: Any, d_states: Any, *, sizes: Sizes,
) -> None:  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        d_states[...] = d_last[0, 0]

    dtype, chunk = v.dtype, sizes.chunk
    keys, queries, documents_row = k[0], q[0], documents[0, 0]
    document_column = _column(documents_row)
    both = jnp.concatenate([keys, queries], axis=0)
    products = _dot(both, keys, (1, 1))
    kk, qk = products[:chunk], products[chunk:]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, kk.shape, axis) for axis in (0, 1))
    at = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
    d_queries = jnp.zeros((chunk, sizes.width), jnp.float32)
    d_keys = jnp.zeros((chunk, sizes.width), jnp.float32)
    for r in range(sizes.repeats):
        gates = _gates(decay[0, 0, 0, r : r + 1], documents_row, document_column)
        strength = _column(beta[0, 0, 0, r : r + 1])
        state, inverse = saved_states[0, 0, 0, r], inverses[0, 0, 0, r]
        columns = slice(r * sizes.values, (r + 1) * sizes.values)
        d_o = d_out[0, :, columns]
        d_state = d_states[r]
        # the forward pass again
        read = _dot(both, state)
        missing = v[0, :, columns].astype(jnp.float32) - gates.from_state * read[:chunk]
        new = _dot(inverse, (strength * missing).astype(dtype)).astype(dtype)
        scores = qk * gates.between
        # what is written, what is read, and the triangular system between the two
        from_next = _dot(keys, d_state.astype(dtype))
        d_new = _dot(scores.astype(dtype), d_o, (0, 0)) + gates.to_state * from_next
        d_wanted = _dot(inverse, d_new.astype(dtype), (0, 0))
        d_missing = strength * d_wanted
        d_v[0, :, columns] = d_missing.astype(d_v.dtype)
        d_scores = _dot(d_o, new, (1, 1))
        d_a = jnp.where(i > j, -_dot(d_wanted.astype(dtype), new, (1, 1)), 0.0) * gates.between
        d_qk, d_kk = (d_scores * gates.between).astype(dtype), (d_a * strength).astype(dtype)
        of_out, of_missing = gates.from_state * d_o.astype(jnp.float32), -gates.from_state * d_missing
        narrow = jnp.concatenate([of_missing, of_out], axis=0).astype(dtype)
        of_states = _dot(narrow, state, (1, 1))
        written = (gates.to_state * new.astype(jnp.float32)).astype(dtype)
        d_queries += _dot(d_qk, keys) + of_states[chunk:]
        d_keys += _dot(d_qk, queries, (0, 0)) + _dot(d_kk, keys) + _dot(d_kk, keys, (0, 0)) + of_states[:chunk]
        d_keys += _dot(written, d_state.astype(dtype), (1, 1))
        # gates: decays between positions, from the state, to the state, of the state
        mixed = d_scores * scores + d_a * strength * kk
        to_last = _row_sums(gates.to_state * (new.astype(jnp.float32) * from_next))
        d_row = _row_sums(mixed) - jnp.sum(mixed, axis=0, keepdims=True) - to_last
        d_row += _row_sums(of_out * read[chunk:] + of_missing * read[:chunk])
        whole = jnp.sum(to_last, axis=1, keepdims=True)
        whole += gates.kept * jnp.sum(d_state * state.astype(jnp.float32), keepdims=True)
        d_decay[0, 0, 0, r : r + 1] = d_row + jnp.where(at == chunk - 1, whole, 0.0)
        d_beta[0, 0, 0, r : r + 1] = _row_sums(d_wanted * missing) + _row_sums(d_a * kk)
        d_states[r] = gates.kept * d_state + _dot(both, narrow, (0, 0))
    d_q[0], d_k[0] = d_queries.astype(d_q.dtype), d_keys.astype(d_k.dtype)

    @pl.when(pl.program_id(2) == sizes.chunks - 1)
    def _() -> None:
        d_first[0, 0] = d_states[...]


_rule.defvjp(_save, _backward)
