"""The gated delta rule as two kernels for TPUs, forward and backward, written in Pallas. Elsewhere they are interpreted:
slow, and only for tests.

The formulas and letters are those of `rule.py`. A program has a chunk of one key head and its value heads; the states
stay in the memory of the core from chunk to chunk. The forward kernel saves what the backward kernel cannot compute
again without the chunks before it, the states, and what is dear, the inverse. The backward kernel goes through the
chunks from the last one on, with the gradient of the state in memory. With `new = T w`, w = beta (v - exp(G) k S), the
gradient of the inverse needs no product with its own: that of A is minus the lower part of (T^T d_new) new^T.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmtrain.models.gated_delta.config import CHUNK
from lmtrain.sharding.local import platform

# Rows of a register with 32 bits.
_ROWS_OF_A_TILE = 8

# Value heads of a program: each product of one waits for the one before it, so that the matrix units would idle.
_CHAINS = 8

# An exponent whose exponential is 0.
_NOTHING = -1e30


class Sizes(NamedTuple):
    """Positions of a chunk, chunks, key heads, those of a program, value heads of each, widths of keys and values."""

    chunk: int
    chunks: int
    keys: int
    group: int
    repeats: int
    width: int
    values: int

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The value heads of a program: key head, and number."""
        return [(key, r) for key in range(self.group) for r in range(self.repeats)]


def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, starts: Any, state: Any, chunk: int) -> tuple[jax.Array, jax.Array]:
    """See `gated_delta_rule`; the number of positions is a multiple of `chunk`."""
    batch, length, keys, width = k.shape
    heads, values = v.shape[2:]
    repeats = heads // keys
    group = max(size for size in range(1, keys + 1) if keys % size == 0 and size * repeats <= max(_CHAINS, repeats))
    sizes = Sizes(chunk, length // chunk, keys, group, repeats, width, values)
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
    chunk, chunks, _, group, repeats, width, values = sizes

    def at(number: Any) -> Any:
        return chunks - 1 - number if is_reversed else number

    def tokens(columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, chunk, columns), lambda b, h, c: (b, at(c), h))

    def of_chunk(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, group, 1, *shape), lambda b, h, c: (b, h, at(c), *(0 for _ in shape)))

    return {
        "keys": tokens(group * width),
        "values": tokens(group * repeats * values),
        "rows": of_chunk(repeats, chunk),
        "documents": pl.BlockSpec((1, 1, 1, chunk), lambda b, h, c: (b, at(c), 0, 0)),
        "state": pl.BlockSpec((1, group, repeats, width, values), lambda b, h, c: (b, h, 0, 0, 0)),
        "states": of_chunk(repeats, width, values),
        "inverses": of_chunk(repeats, chunk, chunk),
    }


def _call(kernel: Any, name: str, sizes: Sizes, batch: int, ins: list[Any], outs: list[Any], shapes: list[Any]) -> Any:
    scratch = pltpu.VMEM((sizes.group, sizes.repeats, sizes.width, sizes.values), jnp.float32)
    return pl.pallas_call(
        kernel,
        name=name,
        grid=(batch, sizes.keys // sizes.group, sizes.chunks),
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
    """Of a value head's chunk: decays between positions, from the state and to it (see `_column`), of the state [1, 1]."""

    between: jax.Array
    from_state: jax.Array
    to_state: jax.Array
    kept: jax.Array


def _column(row: jax.Array) -> jax.Array:
    """[1, L] -> [L, L], whose columns are the row: to use one of them alone, it would be spread over registers again."""
    return jnp.broadcast_to(row, (row.shape[1], row.shape[1])).T


def _scaled(column: jax.Array, x: jax.Array) -> jax.Array:
    """The rows of x [L, N] multiplied by the numbers of a `_column`."""
    times, rest = divmod(x.shape[1], column.shape[1])
    return x * (column[:, :1] if rest else jnp.concatenate([column] * times, axis=1))


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


def _inverses(matrices: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """(I + a)^-1 of each in float32, as `rule.unit_inverse` joins it from blocks. They take turns: each product waits
    for the one before it, so that the matrix units would idle with one alone.

    With 16-bit `dtype` the products have 16-bit operands, and the result T is corrected: with R = I - (I + a) T, whose
    product has three times 16 bits, it is T (I + R + R^2). Its error is below that of rounding it to 16 bits, also for
    equal keys with strengths of 2; every product in three parts would take twice as long.
    """
    size = len(matrices[0])
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    identity = jnp.where(i == j, 1.0, 0.0)
    found = [identity - jnp.where((i ^ j) == 1, a, 0.0) for a in matrices]
    level = 1
    while (2 << (level - 1)) < size:
        is_joint = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) != (j >> level))
        joins = [jnp.where(is_joint, a, 0.0).astype(dtype) for a in matrices]
        wholes = [inverse.astype(dtype) for inverse in found]
        width = 1 << level
        lower = [inverse if width < _ROWS_OF_A_TILE else _every_second(inverse, width) for inverse in found]
        halves = [_dot(rows.astype(dtype), join).astype(dtype) for rows, join in zip(lower, joins, strict=True)]
        lower = [rows - _dot(half, whole) for rows, half, whole in zip(lower, halves, wholes, strict=True)]
        if width < _ROWS_OF_A_TILE:
            found = lower
        else:
            found = [_with_second(inverse, rows, width) for inverse, rows in zip(found, lower, strict=True)]
        level += 1
    if dtype == jnp.float32:
        return found
    errors = [
        identity - inverse - _product(a, inverse, dtype) for a, inverse in zip(matrices, found, strict=True)
    ]
    squares = [_dot(error.astype(dtype), error.astype(dtype)) for error in errors]
    return [
        inverse + _dot(inverse.astype(dtype), (error + square).astype(dtype))
        for inverse, error, square in zip(found, errors, squares, strict=True)
    ]


def _every_second(x: jax.Array, width: int) -> jax.Array:
    """The rows of every second block of `width`: the others do not change when neighbours are joined."""
    return jnp.concatenate([x[at : at + width] for at in range(width, len(x), 2 * width)], axis=0)


def _with_second(x: jax.Array, rows: jax.Array, width: int) -> jax.Array:
    """`x` with these rows in every second block."""
    pairs = ((x[2 * at : 2 * at + width], rows[at : at + width]) for at in range(0, len(rows), width))
    return jnp.concatenate([part for pair in pairs for part in pair], axis=0)


def _product(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """A product of float32 in three of 16 bits."""
    (x_high, x_low), (y_high, y_low) = _parts(x, dtype), _parts(y, dtype)
    return _dot(x_high, y_high) + (_dot(x_high, y_low) + _dot(x_low, y_high))


def _parts(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    high = x.astype(dtype)
    return high, (x - high.astype(jnp.float32)).astype(dtype)


class _Keys(NamedTuple):
    """Of a key head's chunk: keys, queries, both in one, and the products of keys and of queries with keys."""

    k: jax.Array
    q: jax.Array
    both: jax.Array
    kk: jax.Array
    qk: jax.Array


def _keys(q: Any, k: Any, sizes: Sizes) -> list[_Keys]:
    found = []
    for key in range(sizes.group):
        own = slice(key * sizes.width, (key + 1) * sizes.width)
        keys, queries = k[0, :, own], q[0, :, own]
        both = jnp.concatenate([keys, queries], axis=0)
        products = _dot(both, keys, (1, 1))
        found.append(_Keys(keys, queries, both, products[: sizes.chunk], products[sizes.chunk :]))
    return found


def _columns(sizes: Sizes) -> list[slice]:
    """Those of the values of a program's heads."""
    return [slice(n * sizes.values, (n + 1) * sizes.values) for n in range(len(sizes.heads))]


def _forward_kernel(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, documents: Any, first: Any, out: Any, last: Any, *rest: Any,
    sizes: Sizes,
) -> None:  # fmt: skip
    *saved, states = rest

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        states[...] = first[0]

    dtype, chunk, heads, columns = v.dtype, sizes.chunk, sizes.heads, _columns(sizes)
    all_keys, row = _keys(q, k, sizes), documents[0, 0]
    document_column = _column(row)
    reads = [_dot(all_keys[key].both, states[key, r].astype(dtype)) for key, r in heads]
    gates = [_gates(decay[0, key, 0, r : r + 1], row, document_column) for key, r in heads]
    strengths = [_column(beta[0, key, 0, r : r + 1]) for key, r in heads]
    below = _is_below(chunk)
    systems = [
        jnp.where(below, all_keys[key].kk * gates[n].between * strengths[n], 0.0) for n, (key, _) in enumerate(heads)
    ]
    inverses = [inverse.astype(dtype) for inverse in _inverses(systems, dtype)]
    missing = [
        v[0, :, columns[n]].astype(jnp.float32) - _scaled(gates[n].from_state, reads[n][:chunk])
        for n in range(len(heads))
    ]
    new = [_dot(inverses[n], _scaled(strengths[n], missing[n]).astype(dtype)) for n in range(len(heads))]
    for n, (key, r) in enumerate(heads):
        own, state = gates[n], states[key, r]
        within = _dot((all_keys[key].qk * own.between).astype(dtype), new[n].astype(dtype))
        out[0, :, columns[n]] = (_scaled(own.from_state, reads[n][chunk:]) + within).astype(out.dtype)
        if saved:
            saved[0][0, key, 0, r], saved[1][0, key, 0, r] = state.astype(dtype), inverses[n]
        written = _dot(all_keys[key].k, _scaled(own.to_state, new[n]).astype(dtype), (0, 0))
        states[key, r] = state * own.kept + written

    @pl.when(pl.program_id(2) == sizes.chunks - 1)
    def _() -> None:
        last[0] = states[...]


def _is_below(size: int) -> jax.Array:
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return i > j


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


def _row_sums(dtype: Any, *arrays: jax.Array) -> jax.Array:
    """The sums over the last dimensions of all arrays [L, ...], as a row [1, L]: products with ones, with 16-bit `dtype`
    of their first 16 bits."""
    chunk = len(arrays[0])
    folded: dict[int, Any] = {}
    for x in arrays:
        width = chunk if x.shape[1] % chunk == 0 else x.shape[1]
        for at in range(0, x.shape[1], width):
            folded[width] = folded.get(width, 0.0) + x[:, at : at + width]
    parts = [part for x in folded.values() for part in ((x,) if dtype == jnp.float32 else _parts(x, dtype))]
    sums = [_dot(jnp.ones((_ROWS_OF_A_TILE, part.shape[1]), part.dtype), part, (1, 1)) for part in parts]
    return _sum(sums)[:1]


def _backward_kernel(
    q: Any, k: Any, v: Any, decay: Any, beta: Any, documents: Any, saved_states: Any, saved_inverses: Any, d_out: Any,
    d_last: Any, d_q: Any, d_k: Any, d_v: Any, d_decay: Any, d_beta: Any, d_first: Any, d_states: Any, *, sizes: Sizes,
) -> None:  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        d_states[...] = d_last[0]

    dtype, chunk, heads, columns = v.dtype, sizes.chunk, sizes.heads, _columns(sizes)
    all_keys, row = _keys(q, k, sizes), documents[0, 0]
    of, numbers = [all_keys[key] for key, _ in heads], range(len(heads))
    document_column, below = _column(row), _is_below(chunk)
    at = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
    d_o = [d_out[0, :, own] for own in columns]
    states = [saved_states[0, key, 0, r] for key, r in heads]
    inverses = [saved_inverses[0, key, 0, r] for key, r in heads]
    d_next = [d_states[key, r].astype(dtype) for key, r in heads]
    # what needs no other product first, then the forward pass again
    reads = [_dot(of[n].both, states[n]) for n in numbers]
    from_next = [_dot(of[n].k, d_next[n]) for n in numbers]
    gates = [_gates(decay[0, key, 0, r : r + 1], row, document_column) for key, r in heads]
    strengths = [_column(beta[0, key, 0, r : r + 1]) for key, r in heads]
    missing = [
        v[0, :, columns[n]].astype(jnp.float32) - _scaled(gates[n].from_state, reads[n][:chunk]) for n in numbers
    ]
    new = [_dot(inverses[n], _scaled(strengths[n], missing[n]).astype(dtype)).astype(dtype) for n in numbers]
    scores = [of[n].qk * gates[n].between for n in numbers]
    # what is written, and the triangular system
    d_new = [
        _dot(scores[n].astype(dtype), d_o[n], (0, 0)) + _scaled(gates[n].to_state, from_next[n]) for n in numbers
    ]
    d_wanted = [_dot(inverses[n], d_new[n].astype(dtype), (0, 0)) for n in numbers]
    d_missing = [_scaled(strengths[n], d_wanted[n]) for n in numbers]
    d_scores = [_dot(d_o[n], new[n], (1, 1)) for n in numbers]
    d_a = [
        jnp.where(below, -_dot(d_wanted[n].astype(dtype), new[n], (1, 1)), 0.0) * gates[n].between for n in numbers
    ]
    for n in numbers:
        d_v[0, :, columns[n]] = d_missing[n].astype(d_v.dtype)
    # keys and queries: of products with one another, of reading the state, of writing it
    of_out = [_scaled(gates[n].from_state, d_o[n].astype(jnp.float32)) for n in numbers]
    of_missing = [-_scaled(gates[n].from_state, d_missing[n]) for n in numbers]
    of_both = [jnp.concatenate([of_missing[n], of_out[n]], axis=0).astype(dtype) for n in numbers]
    of_states = [_dot(of_both[n], states[n], (1, 1)) for n in numbers]
    written = [_scaled(gates[n].to_state, new[n].astype(jnp.float32)).astype(dtype) for n in numbers]
    writing = [_dot(written[n], d_next[n], (1, 1)) for n in numbers]
    for key, (keys, queries, *_) in enumerate(all_keys):
        own = [n for n in numbers if heads[n][0] == key]
        d_qk = _sum(d_scores[n] * gates[n].between for n in own).astype(dtype)
        d_kk = _sum(d_a[n] * strengths[n] for n in own).astype(dtype)
        read = _sum(of_states[n] for n in own)
        columns_of_key = slice(key * sizes.width, (key + 1) * sizes.width)
        d_q[0, :, columns_of_key] = (_dot(d_qk, keys) + read[chunk:]).astype(d_q.dtype)
        d_keys = _dot(d_qk, queries, (0, 0)) + _dot(d_kk, keys) + _dot(d_kk, keys, (0, 0)) + read[:chunk]
        d_k[0, :, columns_of_key] = (d_keys + _sum(writing[n] for n in own)).astype(d_k.dtype)
    for n, (key, r) in enumerate(heads):
        # gates: decays between positions, from the state and to it, of the state
        mixed = d_scores[n] * scores[n] + d_a[n] * strengths[n] * of[n].kk
        to_last = _scaled(gates[n].to_state, new[n].astype(jnp.float32) * from_next[n])
        from_first = of_out[n] * reads[n][chunk:] + of_missing[n] * reads[n][:chunk] - to_last
        whole = jnp.sum(to_last, keepdims=True)
        whole += gates[n].kept * jnp.sum(d_states[key, r] * states[n].astype(jnp.float32), keepdims=True)
        d_row = _row_sums(dtype, mixed, from_first) - jnp.sum(mixed, axis=0, keepdims=True)
        d_decay[0, key, 0, r : r + 1] = d_row + jnp.where(at == chunk - 1, whole, 0.0)
        d_beta[0, key, 0, r : r + 1] = _row_sums(dtype, d_wanted[n] * missing[n], d_a[n] * of[n].kk)
        d_states[key, r] = gates[n].kept * d_states[key, r] + _dot(of[n].both, of_both[n], (0, 0))

    @pl.when(pl.program_id(2) == sizes.chunks - 1)
    def _() -> None:
        d_first[0] = d_states[...]


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


_rule.defvjp(_save, _backward)
