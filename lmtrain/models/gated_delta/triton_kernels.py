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


def _decays(gates: Gates, first: Any, chunk: int) -> _Decays:
    """Of the chunk at the position `first` of the references."""
    at = pl.ds(first, chunk)
    decay, beta, documents = (ref[at] for ref in gates)
    last, of_last = gates.decay[first + chunk - 1], gates.documents[first + chunk - 1]
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


class Norm(NamedTuple):
    """References to gates of the outputs and to the scale of their norm; its epsilon, and the width of a head."""

    z: Any
    scale: Any
    epsilon: float
    width: int


class _Out(NamedTuple):
    """Of a chunk: outputs, the part of them that is read from the state, products of queries with keys, decays."""

    core: Any
    of_state: Any
    scores: Any
    decays: _Decays


def _out(q: Any, k: Any, new: Any, states: Any, gates: Gates) -> _Out:
    queries, written = q[...], new[...]
    own = _decays(gates, 0, len(queries))
    of_state = own.from_state[:, None] * dot(queries, states[...])
    scores = (dot(queries, k[...], (1, 1)) * own.between).astype(queries.dtype)
    return _Out(of_state + dot(scores, written), of_state, scores, own)


def _gated(core: Any, norm: Norm) -> tuple[Any, ...]:
    """The normalized outputs, the factor [L] of the norm, the scale, and the gates with which share they keep."""
    columns = jnp.arange(core.shape[1]) < norm.width
    z = plgpu.load(norm.z, mask=jnp.broadcast_to(columns[None, :], core.shape), other=0.0).astype(jnp.float32)
    scale = plgpu.load(norm.scale, mask=columns, other=0.0)[None, :]
    factor = jax.lax.rsqrt(jnp.sum(core * core, axis=1) / norm.width + norm.epsilon)
    return core * factor[:, None], factor, scale, z, 1 / (1 + jnp.exp(-z))


def _store(ref: Any, x: Any, width: int) -> None:
    columns = jnp.arange(x.shape[1])[None, :] < width
    plgpu.store(ref, x.astype(ref.dtype), mask=jnp.broadcast_to(columns, x.shape))


def outputs_kernel(
    q: Any, k: Any, new: Any, states: Any, gates: Gates, z: Any, scale: Any, out: Any, *, epsilon: float, width: int
) -> None:
    """The outputs of a chunk, with their norm and its gate."""
    normal, _, factor, z, share = _gated(_out(q, k, new, states, gates).core, Norm(z, scale, epsilon, width))
    _store(out, normal * factor * z * share, width)


def d_outputs_kernel(
    q: Any, k: Any, new: Any, states: Any, gates: Gates, z: Any, scale: Any, d_out: Any, d_core: Any, d_new: Any,
    d_z: Any, d_scale: Any, d_decay: Any, *, epsilon: float, width: int,
) -> None:  # fmt: skip
    """The gradients of a chunk's outputs before the norm, of the gates z, of the scale; what the outputs give to the
    gradients of `new`, and of the decay from the state."""
    found = _out(q, k, new, states, gates)
    normal, factor, weight, gate, share = _gated(found.core, Norm(z, scale, epsilon, width))
    columns = jnp.broadcast_to(jnp.arange(normal.shape[1])[None, :] < width, normal.shape)
    d = plgpu.load(d_out, mask=columns, other=0.0).astype(jnp.float32)
    opened = gate * share
    _store(d_z, d * normal * weight * share * (1 + gate * (1 - share)), width)
    d_scale[...] = jnp.sum(d * normal * opened, axis=0)
    d_normal = d * weight * opened
    along = jnp.sum(d_normal * normal, axis=1) / width
    gradient = factor[:, None] * (d_normal - normal * along[:, None])
    rounded = gradient.astype(d_core.dtype)
    d_core[...] = rounded
    d_new[...] = dot(found.scores, rounded, (0, 0)).astype(d_new.dtype)
    d_decay[...] = jnp.sum(gradient * found.of_state, axis=1)


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


def d_inputs_kernel(
    read: tuple[Any, Any, Any] | None, k: Any, gates: Gates, written: Written, d_q: Any, d_k: Any, d_v: Any,
    d_decay: Any, d_beta: Any, *, part: int,
) -> None:  # fmt: skip
    """The gradients of a chunk's queries, keys, values, decays and strengths. `read`: queries, the gradients of outputs
    and what these give to that of the decay, if the outputs are used."""
    keys = k[...]
    chunk, width, dtype = *keys.shape, keys.dtype
    below, at = _below_diagonal(chunk), jnp.arange(chunk)
    kk = dot(keys, keys, (1, 1))
    queries = None if read is None else read[0][...]
    parts = written.v.shape[2] // part

    def of_head(r: Any, sums: Any) -> Any:
        to_queries, to_keys = sums
        own = _decays(Gates(gates.decay.at[r], gates.beta.at[r], gates.documents), 0, chunk)
        between = own.between
        no_products, no_rows = jnp.zeros((chunk, chunk), jnp.float32), jnp.zeros((chunk, width), jnp.float32)
        mixed, d_row = no_products, jnp.zeros((chunk,), jnp.float32)
        if read is not None:
            d_core, qk = read[1], dot(queries, keys, (1, 1))

            def of_outputs(number: Any, sums: Any) -> Any:
                scores, rows = sums
                columns = pl.ds(number * part, part)
                d = d_core[:, r, columns]
                return (
                    scores + dot(d, written.new[:, r, columns], (1, 1)),
                    rows + dot(d, written.states[r, :, columns], (1, 1)),
                )

            d_scores, rows = jax.lax.fori_loop(0, parts, of_outputs, (no_products, no_rows))
            mixed = d_scores * between
            d_products = mixed.astype(dtype)
            mixed *= qk
            to_queries += own.from_state[:, None] * rows + dot(d_products, keys)
            to_keys += dot(d_products, queries, (0, 0))
            d_row += read[2][r, :]

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
        d_a = jnp.where(below, -products, 0.0) * between
        of_keys = own.from_state * jnp.sum(rows * keys.astype(jnp.float32), axis=1)
        d_beta[r, :] = along - of_keys + jnp.sum(d_a * kk, axis=1)
        d_a *= own.beta[:, None]
        d_products = d_a.astype(dtype)
        to_keys += dot(d_products, keys) + dot(d_products, keys, (0, 0))
        to_keys -= (own.from_state * own.beta)[:, None] * rows
        mixed += d_a * kk
        d_row -= own.beta * of_keys

        def of_states(number: Any, sums: Any) -> Any:
            rows, whole = sums
            columns = pl.ds(number * part, part)
            after = written.d_states[r, :, columns]
            before = written.states[r, :, columns].astype(jnp.float32)
            rows += dot(written.new[:, r, columns], after, (1, 1))
            return rows, whole + jnp.sum(after.astype(jnp.float32) * before)

        rows, whole = jax.lax.fori_loop(0, parts, of_states, (no_rows, jnp.float32(0)))
        rows *= own.to_state[:, None]
        to_keys += rows
        to_last = jnp.sum(rows * keys.astype(jnp.float32), axis=1)
        whole = own.kept * whole + jnp.sum(to_last)
        d_row += jnp.sum(mixed, axis=1) - jnp.sum(mixed, axis=0) - to_last
        d_decay[r, :] = d_row + jnp.where(at == chunk - 1, whole, 0.0)
        return to_queries, to_keys

    zeros = jnp.zeros((chunk, width), jnp.float32)
    to_queries, to_keys = jax.lax.fori_loop(0, d_v.shape[1], of_head, (zeros, zeros))
    d_k[...] = to_keys.astype(dtype)
    if read is not None:
        d_q[...] = to_queries.astype(dtype)
