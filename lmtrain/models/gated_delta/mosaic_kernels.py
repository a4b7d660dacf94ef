"""The bodies of the kernels in `mosaic.py`: a chunk of a few key heads and their value heads, forward and backward.

The formulas and letters are those of `rule.py` and `layer.py`. With `new = T w`, w = beta (v - exp(G) k S), the gradient
of the inverse T needs no product with its own: that of A is minus the lower part of (T^T d_new) new^T.

Arrays of the value heads are lists, computed one stage after another: each product of a head waits for the one before
it, so that the matrix units would idle with one head at a time.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

# Rows of a register with 32 bits.
ROWS = 8

# An exponent whose exponential is 0.
_NOTHING = -1e30


class Sizes(NamedTuple):
    """Positions of a chunk, chunks, key heads, those of a program, value heads of each, widths of keys and values in
    whole registers and without padding, epsilons of the norms of outputs and of queries and keys."""

    chunk: int
    chunks: int
    keys: int
    group: int
    repeats: int
    width: int
    values: int
    key_dim: int
    value_dim: int
    epsilon: float
    unit_epsilon: float

    @property
    def scale(self) -> float:
        """The factor of queries."""
        return float(self.key_dim**-0.5)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The value heads of a program: key head, and number."""
        return [(key, r) for key in range(self.group) for r in range(self.repeats)]


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


def inverses_of(matrices: list[jax.Array], dtype: Any) -> list[jax.Array]:
    """(I + a)^-1 of each in float32, as `rule.unit_inverse` joins it from blocks. They take turns: each product waits
    for the one before it, so that the matrix units would idle with one alone.

    With 16-bit `dtype` the products have 16-bit operands, and the result T is corrected: with R = I - (I + a) T, whose
    product has three times 16 bits, it is T (I + R + R^2). Its error is at most about that of rounding it to 16 bits,
    also for equal keys with strengths of 2; every product in three parts would take twice as long.
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
        lower = [inverse if width < ROWS else _every_second(inverse, width) for inverse in found]
        halves = [_dot(rows.astype(dtype), join).astype(dtype) for rows, join in zip(lower, joins, strict=True)]
        lower = [rows - _dot(half, whole) for rows, half, whole in zip(lower, halves, wholes, strict=True)]
        if width < ROWS:
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


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, arrays)


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
    return _sum(_dot(jnp.ones((ROWS, part.shape[1]), part.dtype), part, (1, 1)) for part in parts)[:1]


def _is_below(size: int) -> jax.Array:
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return i > j


def _sigmoid(x: jax.Array) -> jax.Array:
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)  # one instruction, other than a division


class _Convolved(NamedTuple):
    """Of a chunk: the inputs that each tap sees, those of other documents as 0, and the sum before the activation."""

    seen: list[jax.Array]
    total: jax.Array

    @property
    def activated(self) -> jax.Array:
        return self.total * _sigmoid(self.total)


def _convolve(before: jax.Array, x: jax.Array, taps: Any, positions: jax.Array) -> _Convolved:
    """`before` are the last rows before the chunk, at least as many as taps; `positions` [L, 1] those in documents."""
    joint, rows, number = jnp.concatenate([before, x], axis=0), len(before), len(taps)
    shifted = (joint[rows - back : rows - back + len(x)] for back in range(number))
    seen = [part if back == 0 else jnp.where(positions >= back, part, 0.0) for back, part in enumerate(shifted)]
    return _Convolved(seen, _sum(part * taps[number - 1 - back][None] for back, part in enumerate(seen)))


def _convolve_back(
    d_total: jax.Array, convolved: _Convolved, taps: Any, positions: jax.Array, after: Any, d_taps: Any
) -> jax.Array:
    """The gradient of the chunk's inputs. `after` has what the next chunk's first rows add for each tap, and gets that
    of this chunk; `d_taps` is added to."""
    number, size = len(taps), len(d_total)
    d_x = d_total * taps[number - 1][None]
    d_taps[0, number - 1] += jnp.sum(d_total * convolved.seen[0], axis=0)
    for back in range(1, number):
        own = jnp.where(positions >= back, d_total, 0.0)
        d_taps[0, number - 1 - back] += jnp.sum(d_total * convolved.seen[back], axis=0)
        joint = jnp.concatenate([own, after[back - 1]], axis=0)
        d_x += joint[back : back + size] * taps[number - 1 - back][None]
        after[back - 1] = own[:ROWS]
    return d_x


def _activation_back(d_activated: jax.Array, total: jax.Array) -> jax.Array:
    share = _sigmoid(total)
    return d_activated * share * (1 + total * (1 - share))


def _each(x: jax.Array, width: int) -> list[jax.Array]:
    """The columns of each head."""
    return [x[:, at : at + width] for at in range(0, x.shape[1], width)]


def _unit(x: jax.Array, epsilon: float, scale: float) -> tuple[jax.Array, jax.Array]:
    """x [L, C] divided by its length and multiplied by `scale`, and the factor [L, 1]."""
    factor = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + epsilon)
    return x * (factor * scale), factor


def _unit_back(d_unit: jax.Array, x: jax.Array, factor: jax.Array, scale: float) -> jax.Array:
    along = jnp.sum(d_unit * x, axis=1, keepdims=True)
    return scale * factor * (d_unit - x * (factor * factor * along))


class _Inputs(NamedTuple):
    """Of a program's chunk: convolved q, k, v, and the parts of q and k of unit length: in float32, with factors."""

    convolved: tuple[_Convolved, ...]
    activated: tuple[jax.Array, ...]
    queries: list[tuple[jax.Array, jax.Array]]
    keys: list[tuple[jax.Array, jax.Array]]
    values: list[jax.Array]


def _inputs(befores: Any, raw: Any, taps: Any, positions: jax.Array, sizes: Sizes) -> _Inputs:
    convolved = tuple(
        _convolve(before, x[0].astype(jnp.float32), each, positions)
        for before, x, each in zip(befores, raw, taps, strict=True)
    )
    activated = tuple(each.activated for each in convolved)
    q, k = (_each(x, sizes.width) for x in activated[:2])
    return _Inputs(
        convolved,
        activated,
        [_unit(x, sizes.unit_epsilon, sizes.scale) for x in q],
        [_unit(x, sizes.unit_epsilon, 1.0) for x in k],
        _each(activated[2], sizes.values),
    )


class _Keys(NamedTuple):
    """Of a key head's chunk: keys, queries, both in one, and the products of keys and of queries with keys."""

    k: jax.Array
    q: jax.Array
    both: jax.Array
    kk: jax.Array
    qk: jax.Array


def _keys(inputs: _Inputs, dtype: Any, sizes: Sizes) -> list[_Keys]:
    found = []
    for (q, _), (k, _) in zip(inputs.queries, inputs.keys, strict=True):
        keys, queries = k.astype(dtype), q.astype(dtype)
        both = jnp.concatenate([keys, queries], axis=0)
        products = _dot(both, keys, (1, 1))
        found.append(_Keys(keys, queries, both, products[: sizes.chunk], products[sizes.chunk :]))
    return found


def forward_kernel(
    q: Any, k: Any, v: Any, z: Any, taps_q: Any, taps_k: Any, taps_v: Any, decay: Any, beta: Any, documents: Any,
    positions: Any, scale: Any, out: Any, *rest: Any, sizes: Sizes,
) -> None:  # fmt: skip
    """`out` is that of the norm with its gate; with four more arrays than the scratch, two are saved for the gradient."""
    *saved, states, last_q, last_k, last_v = rest
    befores = last_q, last_k, last_v

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        states[...] = jnp.zeros_like(states)
        for before in befores:
            before[...] = jnp.zeros_like(before)

    dtype, chunk, heads = v.dtype, sizes.chunk, sizes.heads
    numbers = range(len(heads))
    position_column = _column(positions[0, 0])[:, :1]
    inputs = _inputs([x[...] for x in befores], (q, k, v), (taps_q, taps_k, taps_v), position_column, sizes)
    for before, x in zip(befores, (q, k, v), strict=True):
        before[...] = x[0, chunk - ROWS :].astype(jnp.float32)
    all_keys, row = _keys(inputs, dtype, sizes), documents[0, 0]
    document_column, below = _column(row), _is_below(chunk)
    reads = [_dot(all_keys[key].both, states[key, r].astype(dtype)) for key, r in heads]
    gates = [_gates(decay[0, key, 0, r : r + 1], row, document_column) for key, r in heads]
    strengths = [_column(beta[0, key, 0, r : r + 1]) for key, r in heads]
    systems = [
        jnp.where(below, all_keys[key].kk * gates[n].between * strengths[n], 0.0) for n, (key, _) in enumerate(heads)
    ]
    inverses = [inverse.astype(dtype) for inverse in inverses_of(systems, dtype)]
    missing = [inputs.values[n] - _scaled(gates[n].from_state, reads[n][:chunk]) for n in numbers]
    new = [_dot(inverses[n], _scaled(strengths[n], missing[n]).astype(dtype)) for n in numbers]
    within = [
        _dot((all_keys[key].qk * gates[n].between).astype(dtype), new[n].astype(dtype))
        for n, (key, _) in enumerate(heads)
    ]
    for n, (key, r) in enumerate(heads):
        own, state, columns = gates[n], states[key, r], slice(n * sizes.values, (n + 1) * sizes.values)
        core = _scaled(own.from_state, reads[n][chunk:]) + within[n]
        gate = z[0, :, columns].astype(jnp.float32)
        normal = core * _norm_factor(core, sizes) * scale[...]
        out[0, :, columns] = (normal * (gate * _sigmoid(gate))).astype(out.dtype)
        if saved:
            saved[0][0, key, 0, r], saved[1][0, key, 0, r] = state.astype(dtype), inverses[n]
        written = _dot(all_keys[key].k, _scaled(own.to_state, new[n]).astype(dtype), (0, 0))
        states[key, r] = state * own.kept + written


def _norm_factor(x: jax.Array, sizes: Sizes) -> jax.Array:
    return jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / sizes.value_dim + sizes.epsilon)


def backward_kernel(
    q: Any, k: Any, v: Any, z: Any, taps_q: Any, taps_k: Any, taps_v: Any, decay: Any, beta: Any, documents: Any,
    positions: Any, scale: Any, saved_states: Any, saved_inverses: Any, before_q: Any, before_k: Any, before_v: Any,
    d_out: Any, d_q: Any, d_k: Any, d_v: Any, d_z: Any, d_taps_q: Any, d_taps_k: Any, d_taps_v: Any, d_decay: Any,
    d_beta: Any, d_scale: Any, d_states: Any, after_q: Any, after_k: Any, after_v: Any, *, sizes: Sizes,
) -> None:  # fmt: skip
    """The chunks come from the last one on. `before_*` are the last rows of the chunk before."""
    all_d_taps, afters = (d_taps_q, d_taps_k, d_taps_v), (after_q, after_k, after_v)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for array in (d_states, d_scale, *all_d_taps, *afters):
            array[...] = jnp.zeros_like(array)

    dtype, chunk, heads = v.dtype, sizes.chunk, sizes.heads
    numbers = range(len(heads))
    position_column = _column(positions[0, 0])[:, :1]
    befores = [x[0].astype(jnp.float32)[-ROWS:] for x in (before_q, before_k, before_v)]
    all_taps = taps_q, taps_k, taps_v
    inputs = _inputs(befores, (q, k, v), all_taps, position_column, sizes)
    all_keys, row = _keys(inputs, dtype, sizes), documents[0, 0]
    of = [all_keys[key] for key, _ in heads]
    document_column, below = _column(row), _is_below(chunk)
    at = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
    states = [saved_states[0, key, 0, r] for key, r in heads]
    inverses = [saved_inverses[0, key, 0, r] for key, r in heads]
    d_next = [d_states[key, r].astype(dtype) for key, r in heads]
    # what needs no other product first, then the forward pass again
    reads = [_dot(of[n].both, states[n]) for n in numbers]
    from_next = [_dot(of[n].k, d_next[n]) for n in numbers]
    gates = [_gates(decay[0, key, 0, r : r + 1], row, document_column) for key, r in heads]
    strengths = [_column(beta[0, key, 0, r : r + 1]) for key, r in heads]
    missing = [inputs.values[n] - _scaled(gates[n].from_state, reads[n][:chunk]) for n in numbers]
    new = [_dot(inverses[n], _scaled(strengths[n], missing[n]).astype(dtype)).astype(dtype) for n in numbers]
    scores = [of[n].qk * gates[n].between for n in numbers]
    rounded = [score.astype(dtype) for score in scores]
    cores = [_scaled(gates[n].from_state, reads[n][chunk:]) + _dot(rounded[n], new[n]) for n in numbers]
    d_o = []
    for n in numbers:
        columns = slice(n * sizes.values, (n + 1) * sizes.values)
        d_y, gate = d_out[0, :, columns].astype(jnp.float32), z[0, :, columns].astype(jnp.float32)
        factor = _norm_factor(cores[n], sizes)
        normal, share = cores[n] * factor, _sigmoid(gate)
        d_z[0, :, columns] = (d_y * (normal * scale[...]) * share * (1 + gate * (1 - share))).astype(d_z.dtype)
        d_scaled = d_y * (gate * share)
        d_scale[0, 0] += jnp.sum(d_scaled * normal, axis=0, keepdims=True)
        d_normal = d_scaled * scale[...]
        along = jnp.sum(d_normal * normal, axis=1, keepdims=True) / sizes.value_dim
        d_o.append(factor * (d_normal - normal * along))
    narrow = [each.astype(dtype) for each in d_o]
    # what is written, and the triangular system
    d_new = [_dot(rounded[n], narrow[n], (0, 0)) + _scaled(gates[n].to_state, from_next[n]) for n in numbers]
    d_wanted = [_dot(inverses[n], d_new[n].astype(dtype), (0, 0)) for n in numbers]
    d_missing = [_scaled(strengths[n], d_wanted[n]) for n in numbers]
    d_scores = [_dot(narrow[n], new[n], (1, 1)) for n in numbers]
    d_a = [
        jnp.where(below, -_dot(d_wanted[n].astype(dtype), new[n], (1, 1)), 0.0) * gates[n].between for n in numbers
    ]
    # keys and queries: of products with one another, of reading the state, of writing it
    of_out = [_scaled(gates[n].from_state, d_o[n]) for n in numbers]
    of_missing = [-_scaled(gates[n].from_state, d_missing[n]) for n in numbers]
    of_both = [jnp.concatenate([of_missing[n], of_out[n]], axis=0).astype(dtype) for n in numbers]
    of_states = [_dot(of_both[n], states[n], (1, 1)) for n in numbers]
    written = [_scaled(gates[n].to_state, new[n].astype(jnp.float32)).astype(dtype) for n in numbers]
    writing = [_dot(written[n], d_next[n], (1, 1)) for n in numbers]
    d_units: tuple[list[jax.Array], list[jax.Array]] = [], []
    for key, (keys, queries, *_) in enumerate(all_keys):
        own = [n for n in numbers if heads[n][0] == key]
        d_qk = _sum(d_scores[n] * gates[n].between for n in own).astype(dtype)
        d_kk = _sum(d_a[n] * strengths[n] for n in own).astype(dtype)
        read = _sum(of_states[n] for n in own)
        d_units[0].append(_dot(d_qk, keys) + read[chunk:])
        d_keys = _dot(d_qk, queries, (0, 0)) + _dot(d_kk, keys) + _dot(d_kk, keys, (0, 0)) + read[:chunk]
        d_units[1].append(d_keys + _sum(writing[n] for n in own))
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
    # the convolutions
    d_activated: list[jax.Array] = []
    for d_unit, units, x, factor in zip(
        d_units, (inputs.queries, inputs.keys), inputs.activated[:2], (sizes.scale, 1.0), strict=True
    ):
        parts = zip(d_unit, units, _each(x, sizes.width), strict=True)
        d_activated.append(
            jnp.concatenate([_unit_back(d, part, of_length, factor) for d, (_, of_length), part in parts], axis=1)
        )
    d_activated.append(jnp.concatenate(d_missing, axis=1))
    for number, d_raw in enumerate((d_q, d_k, d_v)):
        d_total = _activation_back(d_activated[number], inputs.convolved[number].total)
        d_raw[0] = _convolve_back(
            d_total, inputs.convolved[number], all_taps[number], position_column, afters[number], all_d_taps[number]
        ).astype(d_raw.dtype)
