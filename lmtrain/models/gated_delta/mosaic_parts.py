"""What the kernels in `mosaic_kernels.py` compute of a chunk, in the memory of a core: gates, convolutions, lengths and
norms, with the formulas and letters of `rule.py` and `layer.py`.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmtrain.models.gated_delta.inverse import ROWS, dot, parts_of

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

    def columns(self, number: int) -> slice:
        """Those of a value head."""
        return slice(number * self.values, (number + 1) * self.values)


class _Gates(NamedTuple):
    """Of a value head's chunk: decays between positions, from the state and to it (`as_column`), and of the state."""

    between: jax.Array
    from_state: jax.Array
    to_state: jax.Array
    kept: jax.Array


def as_column(row: jax.Array) -> jax.Array:
    """[1, L] -> [L, L], whose columns are the row: one of them alone would be spread over registers for each use."""
    return jnp.broadcast_to(row, (row.shape[1], row.shape[1])).T


def scaled(column: jax.Array, x: jax.Array) -> jax.Array:
    """The rows of x [L, N] multiplied by the numbers of a `as_column`."""
    times, rest = divmod(x.shape[1], column.shape[1])
    return x * (column[:, :1] if rest else jnp.concatenate([column] * times, axis=1))


def gates_of(decay: jax.Array, documents: jax.Array, document_column: jax.Array) -> _Gates:
    """From rows [1, L], and the documents as a column, too."""
    size = decay.shape[1]
    column, last, of_last = as_column(decay), decay[:, size - 1 :], documents[:, size - 1 :]
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    meet = (document_column == documents) & (i >= j)
    return _Gates(
        jnp.exp(jnp.where(meet, column - decay, _NOTHING)),
        jnp.exp(jnp.where(document_column == 0, column, _NOTHING)),
        jnp.exp(jnp.where(document_column == of_last, last - column, _NOTHING)),
        jnp.exp(jnp.where(of_last == 0, last, _NOTHING)),
    )


def total_of(arrays: Iterable[jax.Array]) -> jax.Array:
    """The sum of arrays."""
    return functools.reduce(jnp.add, arrays)


def row_sums(dtype: Any, *arrays: jax.Array) -> jax.Array:
    """The sums over the last dimensions of all arrays [L, ...], as a row [1, L]: products with ones, with 16-bit
    `dtype` of two parts of 16 bits."""
    chunk = len(arrays[0])
    folded: dict[int, Any] = {}
    for x in arrays:
        width = chunk if x.shape[1] % chunk == 0 else x.shape[1]
        for at in range(0, x.shape[1], width):
            folded[width] = folded.get(width, 0.0) + x[:, at : at + width]
    parts = [part for x in folded.values() for part in ((x,) if dtype == jnp.float32 else parts_of(x, dtype))]
    return total_of(dot(jnp.ones((ROWS, part.shape[1]), part.dtype), part, (1, 1)) for part in parts)[:1]


def below_diagonal(size: int) -> jax.Array:
    """Which entries of a square matrix are below its diagonal."""
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return i > j


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x))."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)  # one instruction, other than a division


class _Convolved(NamedTuple):
    """Of a chunk: the inputs that each tap sees, those of other documents as 0, and the sum before the activation."""

    seen: list[jax.Array]
    total: jax.Array

    @property
    def activated(self) -> jax.Array:
        return self.total * sigmoid(self.total)


def _convolve(before: jax.Array, x: jax.Array, taps: Any, positions: jax.Array) -> _Convolved:
    """`before` are the last rows before the chunk, at least as many as taps; `positions` [L, 1] those in documents."""
    joint, rows, number = jnp.concatenate([before, x], axis=0), len(before), len(taps)
    shifted = (joint[rows - back : rows - back + len(x)] for back in range(number))
    seen = [part if back == 0 else jnp.where(positions >= back, part, 0.0) for back, part in enumerate(shifted)]
    return _Convolved(seen, total_of(part * taps[number - 1 - back][None] for back, part in enumerate(seen)))


def convolve_back(
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


def activation_back(d_activated: jax.Array, total: jax.Array) -> jax.Array:
    """The gradient of x in x sigmoid(x)."""
    share = sigmoid(total)
    return d_activated * share * (1 + total * (1 - share))


def by_head(x: jax.Array, width: int) -> list[jax.Array]:
    """The columns of each head."""
    return [x[:, at : at + width] for at in range(0, x.shape[1], width)]


def _unit(x: jax.Array, epsilon: float, scale: float) -> tuple[jax.Array, jax.Array]:
    """x [L, C] divided by its length and multiplied by `scale`, and the factor [L, 1]."""
    factor = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + epsilon)
    return x * (factor * scale), factor


def unit_back(d_unit: jax.Array, x: jax.Array, factor: jax.Array, scale: float) -> jax.Array:
    """The gradient of x in `_unit`."""
    along = jnp.sum(d_unit * x, axis=1, keepdims=True)
    return scale * factor * (d_unit - x * (factor * factor * along))


class _Inputs(NamedTuple):
    """Of a program's chunk: convolved q, k, v, and the parts of q and k of unit length: in float32, with factors."""

    convolved: tuple[_Convolved, ...]
    activated: tuple[jax.Array, ...]
    queries: list[tuple[jax.Array, jax.Array]]
    keys: list[tuple[jax.Array, jax.Array]]
    values: list[jax.Array]


def inputs_of(befores: Any, raw: Any, taps: Any, positions: jax.Array, sizes: Sizes) -> _Inputs:
    """From the last rows before the chunk, and the chunk itself."""
    convolved = tuple(
        _convolve(before, x[0].astype(jnp.float32), each, positions)
        for before, x, each in zip(befores, raw, taps, strict=True)
    )
    activated = tuple(each.activated for each in convolved)
    q, k = (by_head(x, sizes.width) for x in activated[:2])
    return _Inputs(
        convolved,
        activated,
        [_unit(x, sizes.unit_epsilon, sizes.scale) for x in q],
        [_unit(x, sizes.unit_epsilon, 1.0) for x in k],
        by_head(activated[2], sizes.values),
    )


class _Keys(NamedTuple):
    """Of a key head's chunk: keys, queries, both in one, and the products of keys and of queries with keys."""

    k: jax.Array
    q: jax.Array
    both: jax.Array
    kk: jax.Array
    qk: jax.Array


def keys_of(inputs: _Inputs, dtype: Any, sizes: Sizes) -> list[_Keys]:
    """Of each key head of a program."""
    found = []
    for (q, _), (k, _) in zip(inputs.queries, inputs.keys, strict=True):
        keys, queries = k.astype(dtype), q.astype(dtype)
        both = jnp.concatenate([keys, queries], axis=0)
        products = dot(both, keys, (1, 1))
        found.append(_Keys(keys, queries, both, products[: sizes.chunk], products[sizes.chunk :]))
    return found


def norm_factor(x: jax.Array, sizes: Sizes) -> jax.Array:
    """1 / sqrt(mean(x^2) + epsilon), [L, 1]."""
    return jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / sizes.value_dim + sizes.epsilon)
