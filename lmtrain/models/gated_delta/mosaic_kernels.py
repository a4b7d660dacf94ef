"""The bodies of the kernels in `mosaic.py`: a chunk of a few key heads and their value heads, forward and backward.

With `new = T w`, w = beta (v - exp(G) k S), the gradient of the inverse T needs no product with its own: that of A is
minus the lower part of (T^T d_new) new^T.

Arrays of the value heads are lists, computed one stage after another: each product of a head waits for the one before
it, so that the matrix units would idle with one head at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lmtrain.models.gated_delta.inverse import ROWS, dot, inverses_of
from lmtrain.models.gated_delta.mosaic_parts import (
    Sizes,
    activation_back,
    as_column,
    below_diagonal,
    by_head,
    convolve_back,
    gates_of,
    inputs_of,
    keys_of,
    norm_factor,
    row_sums,
    scaled,
    sigmoid,
    total_of,
    unit_back,
)


def forward_kernel(
    q: Any, k: Any, v: Any, z: Any, taps_q: Any, taps_k: Any, taps_v: Any, decay: Any, beta: Any, documents: Any,
    positions: Any, scale: Any, out: Any, *rest: Any, sizes: Sizes,
) -> None:  # fmt: skip
    """`out` is that of the norm with its gate. `rest`: two arrays that are saved for the gradient, if any; scratch."""
    *saved, states, last_q, last_k, last_v = rest
    befores = last_q, last_k, last_v

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        states[...] = jnp.zeros_like(states)
        for before in befores:
            before[...] = jnp.zeros_like(before)

    dtype, chunk, heads = v.dtype, sizes.chunk, sizes.heads
    numbers = range(len(heads))
    position_column = as_column(positions[0, 0])[:, :1]
    inputs = inputs_of([x[...] for x in befores], (q, k, v), (taps_q, taps_k, taps_v), position_column, sizes)
    for before, x in zip(befores, (q, k, v), strict=True):
        before[...] = x[0, chunk - ROWS :].astype(jnp.float32)
    all_keys, row = keys_of(inputs, dtype, sizes), documents[0, 0]
    document_column, below = as_column(row), below_diagonal(chunk)
    reads = [dot(all_keys[key].both, states[key, r].astype(dtype)) for key, r in heads]
    gates = [gates_of(decay[0, key, 0, r : r + 1], row, document_column) for key, r in heads]
    strengths = [as_column(beta[0, key, 0, r : r + 1]) for key, r in heads]
    systems = [
        jnp.where(below, all_keys[key].kk * gates[n].between * strengths[n], 0.0) for n, (key, _) in enumerate(heads)
    ]
    inverses = [inverse.astype(dtype) for inverse in inverses_of(systems, dtype)]
    missing = [inputs.values[n] - scaled(gates[n].from_state, reads[n][:chunk]) for n in numbers]
    new = [dot(inverses[n], scaled(strengths[n], missing[n]).astype(dtype)) for n in numbers]
    within = [
        dot((all_keys[key].qk * gates[n].between).astype(dtype), new[n].astype(dtype))
        for n, (key, _) in enumerate(heads)
    ]
    for n, (key, r) in enumerate(heads):
        own, state, columns = gates[n], states[key, r], sizes.columns(n)
        core = scaled(own.from_state, reads[n][chunk:]) + within[n]
        gate = z[0, :, columns].astype(jnp.float32)
        normal = core * norm_factor(core, sizes) * scale[...]
        out[0, :, columns] = (normal * (gate * sigmoid(gate))).astype(out.dtype)
        if saved:
            saved[0][0, key, 0, r], saved[1][0, key, 0, r] = state.astype(dtype), inverses[n]
        written = dot(all_keys[key].k, scaled(own.to_state, new[n]).astype(dtype), (0, 0))
        states[key, r] = state * own.kept + written


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
    position_column = as_column(positions[0, 0])[:, :1]
    befores = [x[0].astype(jnp.float32)[-ROWS:] for x in (before_q, before_k, before_v)]
    all_taps = taps_q, taps_k, taps_v
    inputs = inputs_of(befores, (q, k, v), all_taps, position_column, sizes)
    all_keys, row = keys_of(inputs, dtype, sizes), documents[0, 0]
    of = [all_keys[key] for key, _ in heads]
    document_column, below = as_column(row), below_diagonal(chunk)
    at = jax.lax.broadcasted_iota(jnp.int32, (1, chunk), 1)
    states = [saved_states[0, key, 0, r] for key, r in heads]
    inverses = [saved_inverses[0, key, 0, r] for key, r in heads]
    d_next = [d_states[key, r].astype(dtype) for key, r in heads]
    # what needs no other product first, then the forward pass again
    reads = [dot(of[n].both, states[n]) for n in numbers]
    from_next = [dot(of[n].k, d_next[n]) for n in numbers]
    gates = [gates_of(decay[0, key, 0, r : r + 1], row, document_column) for key, r in heads]
    strengths = [as_column(beta[0, key, 0, r : r + 1]) for key, r in heads]
    missing = [inputs.values[n] - scaled(gates[n].from_state, reads[n][:chunk]) for n in numbers]
    new = [dot(inverses[n], scaled(strengths[n], missing[n]).astype(dtype)).astype(dtype) for n in numbers]
    scores = [of[n].qk * gates[n].between for n in numbers]
    rounded = [score.astype(dtype) for score in scores]
    cores = [scaled(gates[n].from_state, reads[n][chunk:]) + dot(rounded[n], new[n]) for n in numbers]
    d_o = []
    for n in numbers:
        columns = sizes.columns(n)
        d_y, gate = d_out[0, :, columns].astype(jnp.float32), z[0, :, columns].astype(jnp.float32)
        factor = norm_factor(cores[n], sizes)
        normal, share = cores[n] * factor, sigmoid(gate)
        d_z[0, :, columns] = (d_y * (normal * scale[...]) * share * (1 + gate * (1 - share))).astype(d_z.dtype)
        d_scaled = d_y * (gate * share)
        d_scale[0, 0] += jnp.sum(d_scaled * normal, axis=0, keepdims=True)
        d_normal = d_scaled * scale[...]
        along = jnp.sum(d_normal * normal, axis=1, keepdims=True) / sizes.value_dim
        d_o.append(factor * (d_normal - normal * along))
    narrow = [each.astype(dtype) for each in d_o]
    # what is written, and the triangular system
    d_new = [dot(rounded[n], narrow[n], (0, 0)) + scaled(gates[n].to_state, from_next[n]) for n in numbers]
    d_wanted = [dot(inverses[n], d_new[n].astype(dtype), (0, 0)) for n in numbers]
    d_missing = [scaled(strengths[n], d_wanted[n]) for n in numbers]
    d_scores = [dot(narrow[n], new[n], (1, 1)) for n in numbers]
    d_a = [jnp.where(below, -dot(d_wanted[n].astype(dtype), new[n], (1, 1)), 0.0) * gates[n].between for n in numbers]
    # keys and queries: of products with one another, of reading the state, of writing it
    of_out = [scaled(gates[n].from_state, d_o[n]) for n in numbers]
    of_missing = [-scaled(gates[n].from_state, d_missing[n]) for n in numbers]
    of_both = [jnp.concatenate([of_missing[n], of_out[n]], axis=0).astype(dtype) for n in numbers]
    of_states = [dot(of_both[n], states[n], (1, 1)) for n in numbers]
    written = [scaled(gates[n].to_state, new[n].astype(jnp.float32)).astype(dtype) for n in numbers]
    writing = [dot(written[n], d_next[n], (1, 1)) for n in numbers]
    d_units: tuple[list[jax.Array], list[jax.Array]] = [], []
    for key, own in enumerate(all_keys):
        its = [n for n in numbers if heads[n][0] == key]
        d_qk = total_of(d_scores[n] * gates[n].between for n in its).astype(dtype)
        d_kk = total_of(d_a[n] * strengths[n] for n in its).astype(dtype)
        read = total_of(of_states[n] for n in its)
        d_units[0].append(dot(d_qk, own.k) + read[chunk:])
        d_keys = dot(d_qk, own.q, (0, 0)) + dot(d_kk, own.k) + dot(d_kk, own.k, (0, 0)) + read[:chunk]
        d_units[1].append(d_keys + total_of(writing[n] for n in its))
    for n, (key, r) in enumerate(heads):
        # gates: decays between positions, from the state and to it, of the state
        mixed = d_scores[n] * scores[n] + d_a[n] * strengths[n] * of[n].kk
        to_last = scaled(gates[n].to_state, new[n].astype(jnp.float32) * from_next[n])
        from_first = of_out[n] * reads[n][chunk:] + of_missing[n] * reads[n][:chunk] - to_last
        whole = jnp.sum(to_last, keepdims=True)
        whole += gates[n].kept * jnp.sum(d_states[key, r] * states[n].astype(jnp.float32), keepdims=True)
        d_row = row_sums(dtype, mixed, from_first) - jnp.sum(mixed, axis=0, keepdims=True)
        d_decay[0, key, 0, r : r + 1] = d_row + jnp.where(at == chunk - 1, whole, 0.0)
        d_beta[0, key, 0, r : r + 1] = row_sums(dtype, d_wanted[n] * missing[n], d_a[n] * of[n].kk)
        d_states[key, r] = gates[n].kept * d_states[key, r] + dot(of[n].both, of_both[n], (0, 0))
    # the convolutions
    d_activated: list[jax.Array] = []
    for d_unit, units, x, of_type in zip(
        d_units, (inputs.queries, inputs.keys), inputs.activated[:2], (sizes.scale, 1.0), strict=True
    ):
        parts = zip(d_unit, units, by_head(x, sizes.width), strict=True)
        d_activated.append(
            jnp.concatenate([unit_back(d, part, length, of_type) for d, (_, length), part in parts], axis=1)
        )
    d_activated.append(jnp.concatenate(d_missing, axis=1))
    for number, d_raw in enumerate((d_q, d_k, d_v)):
        d_total = activation_back(d_activated[number], inputs.convolved[number].total)
        d_raw[0] = convolve_back(
            d_total, inputs.convolved[number], all_taps[number], position_column, afters[number], all_d_taps[number]
        ).astype(d_raw.dtype)
