"""The bodies of the kernels in `triton.py`, with the formulas and letters of `rule.py`. Where a kernel computes the
chunks of a head one after another, it does so for a part of the value columns, which do not depend on one another.

With w = beta (v - exp(G) k S) and new = T w, the gradient of the inverse T needs no product with its own: that of A is
minus the lower part of d_w new^T, where d_w = T^T d_new.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.gated_delta.inverse import dot, inverses_of

# An exponent whose exponential is 0.
_NOTHING = -1e30


class Gates(NamedTuple):
    """References to the cumulative logarithms of decays within chunks, strengths, and documents of a chunk."""

    decay: Any
    beta: Any
    documents: Any


class _Decays(NamedTuple):
    """From the state to each position, from each to the state after the chunk, and of the state; strengths."""

    decay: Any
    beta: Any
    documents: Any
    from_state: Any
    to_state: Any
    kept: Any

    @property
    def between(self) -> Any:
        """[L, L], from the position of a column to that of a row."""
        size = self.decay.shape[0]
        at = jnp.arange(size)
        meet = (self.documents[:, None] == self.documents[None, :]) & (at[:, None] >= at[None, :])
        return jnp.exp(jnp.where(meet, self.decay[:, None] - self.decay[None, :], _NOTHING))


def _decays(gates: Gates, first: Any, chunk: int, head: tuple[Any, ...] = ()) -> _Decays:
    """Of the chunk at the position `first` of the references, of which the gates may be those of several heads."""
    at, end = pl.ds(first, chunk), first + chunk - 1
    decay, beta, documents = gates.decay[*head, at], gates.beta[*head, at], gates.documents[at]
    last, of_last = gates.decay[*head, end], gates.documents[end]
    return _Decays(
        decay,
        beta,
        documents,
        jnp.exp(jnp.where(documents == 0, decay, _NOTHING)),
        jnp.exp(jnp.where(documents == of_last, last - decay, _NOTHING)),
        jnp.exp(jnp.where(of_last == 0, last, _NOTHING)),
    )


def _below_diagonal(size: int) -> Any:
    at = jnp.arange(size)
    return at[:, None] > at[None, :]


def inverse_kernel(k: Any, gates: Gates, inverse: Any) -> None:
    """The inverse of a chunk."""
    keys = k[...]
    own = _decays(gates, 0, len(keys))
    products = dot(keys, keys, (1, 1)) * own.between * own.beta[:, None]
    (found,) = inverses_of([jnp.where(_below_diagonal(len(keys)), products, 0.0)], keys.dtype, has_slices=False)
    inverse[...] = found.astype(inverse.dtype)


def states_kernel(
    k: Any, v: Any, gates: Gates, inverses: Any, state: Any, new: Any, states: Any, final: Any, *, chunk: int
) -> None:
    """The values that all chunks write, and the states before each."""

    def step(number: Any, now: Any) -> Any:
        at = pl.ds(number * chunk, chunk)
        keys, own = k[at, :], _decays(gates, number * chunk, chunk)
        rounded = now.astype(keys.dtype)
        states[number, :, :] = rounded
        missing = v[at, :].astype(jnp.float32) - own.from_state[:, None] * dot(keys, rounded)
        written = dot(inverses[at, :], (own.beta[:, None] * missing).astype(keys.dtype))
        new[at, :] = written.astype(new.dtype)
        return own.kept * now + dot(keys, (own.to_state[:, None] * written).astype(keys.dtype), (0, 0))

    final[...] = jax.lax.fori_loop(0, k.shape[0] // chunk, step, state[...])


class _Outputs:
    """The outputs of a chunk, before and after their norm and its gate, by parts of their columns."""

    def __init__(self, q: Any, k: Any, new: Any, states: Any, gates: Gates, z: Any, scale: Any, width: int) -> None:
        queries = q[...]
        self.queries, self.new, self.states, self.z, self.scale, self.width = queries, new, states, z, scale, width
        self.decays = _decays(gates, 0, len(queries))
        self.scores = (dot(queries, k[...], (1, 1)) * self.decays.between).astype(queries.dtype)

    def core(self, first: Any, size: int) -> Any:
        """Float32 [L, size], before the norm."""
        columns = pl.ds(first, size)
        of_state = self.decays.from_state[:, None] * dot(self.queries, self.states[:, columns])
        return of_state + dot(self.scores, self.new[:, columns])

    def load(self, ref: Any, first: Any, size: int) -> Any:
        """Columns of an array with those of heads without padding."""
        here = jnp.broadcast_to((first + jnp.arange(size))[None, :] < self.width, (len(self.queries), size))
        return plgpu.load(ref.at[:, pl.ds(first, size)], mask=here, other=0.0).astype(jnp.float32)

    def store(self, ref: Any, first: Any, x: Any) -> None:
        """Write such columns."""
        here = jnp.broadcast_to((first + jnp.arange(x.shape[1]))[None, :] < self.width, x.shape)
        plgpu.store(ref.at[:, pl.ds(first, x.shape[1])], x.astype(ref.dtype), mask=here)

    def weight(self, first: Any, size: int) -> Any:
        """The scale of the norm, [1, size]."""
        here = first + jnp.arange(size) < self.width
        return plgpu.load(self.scale.at[pl.ds(first, size)], mask=here, other=0.0)[None, :]

    def gate(self, first: Any, size: int) -> tuple[Any, Any]:
        """z, and the share of it that the activation keeps."""
        z = self.load(self.z, first, size)
        return z, 1 / (1 + jnp.exp(-z))


def outputs_kernel(
    q: Any, k: Any, new: Any, states: Any, gates: Gates, z: Any, scale: Any, out: Any, *, epsilon: float, width: int
) -> None:
    """The outputs of a chunk, with their norm and its gate."""
    own, columns = _Outputs(q, k, new, states, gates, z, scale, width), new.shape[1]
    core, (gate, share) = own.core(0, columns), own.gate(0, columns)
    factor = jax.lax.rsqrt(jnp.sum(core * core, axis=1) / width + epsilon)
    own.store(out, 0, core * factor[:, None] * own.weight(0, columns) * gate * share)


def d_outputs_kernel(
    q: Any, k: Any, new: Any, states: Any, gates: Gates, z: Any, scale: Any, d_out: Any, d_core: Any, d_new: Any,
    d_z: Any, d_scale: Any, *, epsilon: float, width: int, part: int,
) -> None:  # fmt: skip
    """The gradients of a chunk's outputs before the norm, of the gates z, of the scale; what the outputs give to the
    gradients of `new`. The outputs are computed twice, by parts, which fit into registers."""
    own, parts = _Outputs(q, k, new, states, gates, z, scale, width), new.shape[1] // part

    def statistics(number: Any, sums: Any) -> Any:
        first, (squares, along) = number * part, sums
        core, (gate, share) = own.core(first, part), own.gate(first, part)
        upstream = own.load(d_out, first, part) * own.weight(first, part) * gate * share
        return squares + jnp.sum(core * core, axis=1), along + jnp.sum(upstream * core, axis=1)

    none = jnp.zeros((q.shape[0],), jnp.float32)
    squares, along = jax.lax.fori_loop(0, parts, statistics, (none, none))
    factor = jax.lax.rsqrt(squares / width + epsilon)
    along = factor * factor * along / width

    def gradients(number: Any, carry: Any) -> Any:
        first = number * part
        core, (gate, share) = own.core(first, part), own.gate(first, part)
        d, weight = own.load(d_out, first, part), own.weight(first, part)
        normal = core * factor[:, None]
        own.store(d_z, first, d * normal * weight * share * (1 + gate * (1 - share)))
        d *= gate * share
        d_scale[pl.ds(first, part)] = jnp.sum(d * normal, axis=0)
        gradient = (factor[:, None] * (d * weight - core * along[:, None])).astype(d_core.dtype)
        d_core[:, pl.ds(first, part)] = gradient
        d_new[:, pl.ds(first, part)] = dot(own.scores, gradient, (0, 0)).astype(d_new.dtype)
        return carry

    jax.lax.fori_loop(0, parts, gradients, 0)


class Read(NamedTuple):
    """References to queries, the gradients of outputs, and what these give to those of `new`."""

    q: Any
    d_core: Any
    d_new: Any


def d_states_kernel(
    read: Read | None, k: Any, gates: Gates, inverses: Any, d_final: Any, d_wanted: Any, d_states: Any, d_first: Any,
    *, chunk: int,
) -> None:  # fmt: skip
    """From the last chunk to the first: the gradients of T^-1 new, and of the states after each chunk. `read` None:
    only the last state is used."""
    chunks = k.shape[0] // chunk

    def step(turn: Any, d_after: Any) -> Any:
        number = chunks - 1 - turn
        at = pl.ds(number * chunk, chunk)
        keys, own = k[at, :], _decays(gates, number * chunk, chunk)
        rounded = d_after.astype(keys.dtype)
        d_states[number, :, :] = rounded
        d_new = own.to_state[:, None] * dot(keys, rounded)
        if read is not None:
            d_new += read.d_new[at, :].astype(jnp.float32)
        d_w = dot(inverses[at, :], d_new.astype(keys.dtype), (0, 0))
        d_wanted[at, :] = d_w.astype(d_wanted.dtype)
        of_keys = (own.from_state * own.beta)[:, None] * d_w
        d_before = own.kept * d_after - dot(keys, of_keys.astype(keys.dtype), (0, 0))
        if read is not None:
            of_queries = own.from_state[:, None] * read.d_core[at, :].astype(jnp.float32)
            d_before += dot(read.q[at, :], of_queries.astype(keys.dtype), (0, 0))
        return d_before

    d_first[...] = jax.lax.fori_loop(0, chunks, step, d_final[...])


class Written(NamedTuple):
    """References, of the value heads of a key head: values, those that are written, and the gradient of T^-1 new;
    states before and gradients of those after the chunk."""

    v: Any
    new: Any
    d_wanted: Any
    states: Any
    d_states: Any


def d_read_kernel(
    q: Any, k: Any, gates: Gates, new: Any, states: Any, d_core: Any, d_q: Any, d_k: Any, d_decay: Any, *, part: int
) -> None:
    """The gradients of a chunk's queries, and what outputs give to those of keys and decays, of a key head with its
    value heads."""
    queries, keys = q[...], k[...]
    (chunk, width), dtype = keys.shape, keys.dtype
    products = dot(queries, keys, (1, 1))

    def of_head(r: Any, sums: Any) -> Any:
        def of_part(number: Any, sums: Any) -> Any:
            columns = pl.ds(number * part, part)
            d, (scores, rows) = d_core[:, r, columns], sums
            return scores + dot(d, new[:, r, columns], (1, 1)), rows + dot(d, states[r, :, columns], (1, 1))

        none = jnp.zeros((chunk, chunk), jnp.float32), jnp.zeros((chunk, width), jnp.float32)
        d_scores, rows = jax.lax.fori_loop(0, new.shape[2] // part, of_part, none)
        own = _decays(gates, 0, chunk, (r,))
        d_scores *= own.between
        rows *= own.from_state[:, None]
        mixed = d_scores * products
        d_row = jnp.sum(mixed, axis=1) - jnp.sum(mixed, axis=0)
        d_decay[r, :] = d_row + jnp.sum(rows * queries.astype(jnp.float32), axis=1)
        d_products = d_scores.astype(dtype)
        return sums[0] + rows + dot(d_products, keys), sums[1] + dot(d_products, queries, (0, 0))

    zeros = jnp.zeros((chunk, width), jnp.float32)
    to_queries, to_keys = jax.lax.fori_loop(0, new.shape[1], of_head, (zeros, zeros))
    d_q[...] = to_queries.astype(dtype)
    d_k[...] = to_keys.astype(dtype)


def d_written_kernel(
    k: Any, gates: Gates, written: Written, read: tuple[Any, Any] | None, d_k: Any, d_v: Any, d_decay: Any, d_beta: Any,
    *, part: int,
) -> None:  # fmt: skip
    """The gradients of a chunk's keys, values, decays and strengths. `read`: what outputs give to those of keys and
    decays, if they are used."""
    keys = k[...]
    (chunk, width), dtype = keys.shape, keys.dtype
    below, at = _below_diagonal(chunk), jnp.arange(chunk)
    kk, parts = dot(keys, keys, (1, 1)), written.v.shape[2] // part
    no_products, no_rows = jnp.zeros((chunk, chunk), jnp.float32), jnp.zeros((chunk, width), jnp.float32)

    def of_head(r: Any, to_keys: Any) -> Any:
        own = _decays(gates, 0, chunk, (r,))

        def of_wanted(number: Any, sums: Any) -> Any:
            products, rows, along = sums
            columns = pl.ds(number * part, part)
            d = written.d_wanted[:, r, columns]
            wide = d.astype(jnp.float32)
            d_v[:, r, columns] = (own.beta[:, None] * wide).astype(dtype)
            return (
                products + dot(d, written.new[:, r, columns], (1, 1)),
                rows + dot(d, written.states[r, :, columns], (1, 1)),
                along + jnp.sum(wide * written.v[:, r, columns].astype(jnp.float32), axis=1),
            )

        zeros = jnp.zeros((chunk,), jnp.float32)
        products, rows, along = jax.lax.fori_loop(0, parts, of_wanted, (no_products, no_rows, zeros))
        rows *= own.from_state[:, None]
        of_keys = jnp.sum(rows * keys.astype(jnp.float32), axis=1)
        to_keys -= own.beta[:, None] * rows
        d_a = jnp.where(below, -products, 0.0) * own.between
        d_beta[r, :] = along - of_keys + jnp.sum(d_a * kk, axis=1)
        d_a *= own.beta[:, None]
        mixed, d_products = d_a * kk, d_a.astype(dtype)
        d_row = jnp.sum(mixed, axis=1) - jnp.sum(mixed, axis=0) - own.beta * of_keys
        to_keys += dot(d_products, keys)
        to_keys += dot(d_products, keys, (0, 0))

        def of_states(number: Any, sums: Any) -> Any:
            rows, whole = sums
            columns = pl.ds(number * part, part)
            after = written.d_states[r, :, columns]
            before = written.states[r, :, columns].astype(jnp.float32)
            rows += dot(written.new[:, r, columns], after, (1, 1))
            return rows, whole + jnp.sum(after.astype(jnp.float32) * before)

        rows, whole = jax.lax.fori_loop(0, parts, of_states, (no_rows, jnp.float32(0)))
        rows *= own.to_state[:, None]
        to_last = jnp.sum(rows * keys.astype(jnp.float32), axis=1)
        whole = own.kept * whole + jnp.sum(to_last)
        d_row += jnp.where(at == chunk - 1, whole, 0.0) - to_last
        d_decay[r, :] = d_row if read is None else d_row + read[1][r, :]
        return to_keys + rows

    begin = no_rows if read is None else read[0][...].astype(jnp.float32)
    d_k[...] = jax.lax.fori_loop(0, d_v.shape[1], of_head, begin).astype(dtype)
