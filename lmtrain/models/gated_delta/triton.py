"""The gated delta rule on NVIDIA GPUs, in Pallas: a few kernels forward and backward, instead of some operations of XLA
for each chunk. On other devices they are interpreted: slow, and only for tests.

Only what the state needs is computed chunk by chunk, with the state in registers, for each head and part of the value
columns (as in flash-linear-attention, Yang and Zhang 2024); inverses, outputs and most gradients are computed of all
chunks at once. Saved for the gradient are the inverses, the states, and the values that chunks write.

    B batch  T positions  L positions of a chunk  N chunks  K key heads  R value heads of a key head  H value heads
    C width of keys  E width of values, both as `triton_inputs.tile_of`
"""

import functools
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.models.gated_delta import triton_kernels as kernels
from lmtrain.models.gated_delta.config import BACKWARD, FORWARD
from lmtrain.models.gated_delta.triton_inputs import Unit, convolved
from lmtrain.models.gated_delta.triton_kernels import Gates, Read, Written
from lmtrain.sharding.local import platform

# Positions of a chunk: with 128, products of chunk and chunk, and registers for them, would be the most.
_CHUNK = 64

# Columns of the values of a program that computes all chunks; and of a step of one that computes a chunk.
_COLUMNS, _PART = 32, 64


# Warps and stages of loads of programs that compute all chunks. Others have no loads to overlap with products.
_IN_TURN = {"warps": 4, "stages": 2}


class _Static(NamedTuple):
    """The epsilon of the norm, and the width of a head of values without padding."""

    epsilon: float
    width: int


def inputs(
    raw: tuple[Any, ...], taps: tuple[Any, ...], within_BT: jax.Array, before: Any, epsilon: float
) -> tuple[jax.Array, ...]:
    """Queries, keys and values [B, T, heads, tile], as `chunks.inputs` gives them."""
    found = []
    units = Unit(epsilon, taps[0].shape[2] ** -0.5), Unit(epsilon, 1.0), None
    for number, (x, kernel, unit) in enumerate(zip(raw, taps, units, strict=True)):
        x, within = x.reshape(*x.shape[:2], *kernel.shape[1:]), within_BT
        if before is not None:
            earlier = before[number].reshape(len(x), -1, *x.shape[2:])
            x, within = jnp.concatenate([earlier, x], axis=1), jnp.pad(within, ((0, 0), (earlier.shape[1], 0)))
        found.append(convolved(unit, x, kernel, within)[:, x.shape[1] - within_BT.shape[1] :])
    return tuple(found)


class _Rule(NamedTuple):
    """Arrays of whole chunks: keys [B, T, K, C], values [B, T, H, E], gates by head, state [B, H, C, E]."""

    k: jax.Array
    v: jax.Array
    gates: Gates
    state: jax.Array


def _rule_of(k: Any, v: Any, g_BTH: Any, beta_BTH: Any, starts_BT: Any, state: Any) -> _Rule:
    def by_chunk(x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [B, ..., N, L]"""
        x = jnp.moveaxis(_whole(x), 1, -1)
        return x.reshape(*x.shape[:-1], -1, _CHUNK)

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:-2], -1)

    decay = flat(jnp.cumsum(by_chunk(g_BTH), -1))
    documents = flat(jnp.cumsum(by_chunk(starts_BT), -1, dtype=jnp.int32))
    return _Rule(_whole(k), _whole(v), Gates(decay, flat(by_chunk(beta_BTH)), documents), state)


def _whole(x: jax.Array) -> jax.Array:
    """[B, T, ...] padded to whole chunks: padding has no strength, and leaves the state as it is."""
    missing = -x.shape[1] % _CHUNK
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in x.shape[2:]))) if missing else x


def state_change(k: Any, v: Any, g_BTH: Any, beta_BTH: Any, starts_BT: Any, state: jax.Array) -> jax.Array:
    """The state after the last position, float32 [B, H, C, E]; see `rule.gated_delta_rule`."""
    result: jax.Array = _change(_rule_of(k, v, g_BTH, beta_BTH, starts_BT, state))
    return result


def outputs(
    mixed: tuple[jax.Array, ...], z: jax.Array, g_BTH: Any, beta_BTH: Any, starts_BT: Any, state: jax.Array | None,
    scale_E: jax.Array, epsilon: float,
) -> jax.Array:  # fmt: skip
    """The outputs of the rule with their norm and its gate, [B, T, H E]. `mixed` is from `inputs`; `z` like it."""
    (q, k, v), width = mixed, scale_E.shape[0]
    batch, length, heads, columns = v.shape
    if state is None:
        state = jnp.zeros((batch, heads, k.shape[3], columns), jnp.float32)
    rule = _rule_of(k, v, g_BTH, beta_BTH, starts_BT, state)
    gates = _whole(z.reshape(batch, length, heads, width))
    out = _outputs(_Static(epsilon, width), rule, _whole(q), gates, scale_E.astype(jnp.float32))
    return out[:, :length].reshape(batch, length, heads * width)


def _call(
    kernel: Any, name: str, grid: Any, ins: Any, outs: Any, shapes: Any, warps: int = 8, stages: int = 1,
    aliases: Any = MappingProxyType({}),
) -> Any:  # fmt: skip
    return pl.pallas_call(
        kernel,
        name=name,
        grid=grid,
        in_specs=ins,
        out_specs=outs,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        input_output_aliases=dict(aliases),
        interpret=platform() != "gpu",
    )


class _Blocks:
    """Blocks of arrays: of a chunk for the grid (N, heads, B), or of all for the grid (parts of E, H, B)."""

    def __init__(self, rule: _Rule) -> None:
        self.batch, self.length, self.keys, self.width = rule.k.shape
        self.heads, self.values = rule.v.shape[2:]
        self.chunks, self.repeats = self.length // _CHUNK, self.heads // self.keys
        self.dtype = rule.v.dtype
        self.columns, self.part = (min(size, self.values & -self.values) for size in (_COLUMNS, _PART))
        self.grid = self.values // self.columns, self.heads, self.batch
        repeats, width, values, columns, length = self.repeats, self.width, self.values, self.columns, self.length
        self.all_keys = pl.BlockSpec((None, length, None, width), lambda e, h, b: (b, 0, h // repeats, 0))
        self.all_values = pl.BlockSpec((None, length, None, columns), lambda e, h, b: (b, 0, h, e))
        row = pl.BlockSpec((None, None, length), lambda e, h, b: (b, h, 0))
        self.all_gates = Gates(row, row, pl.BlockSpec((None, length), lambda e, h, b: (b, 0)))
        self.all_inverses = pl.BlockSpec((None, None, length, _CHUNK), lambda e, h, b: (b, h, 0, 0))
        self.state = pl.BlockSpec((None, None, width, columns), lambda e, h, b: (b, h, 0, e))
        self.all_states = pl.BlockSpec((None, None, self.chunks, width, columns), lambda e, h, b: (b, h, 0, 0, e))
        self.keys_of_chunk = pl.BlockSpec((None, _CHUNK, None, width), lambda n, h, b: (b, n, h // repeats, 0))
        self.values_of_chunk = pl.BlockSpec((None, _CHUNK, None, values), lambda n, h, b: (b, n, h, 0))
        self.row_of_chunk = pl.BlockSpec((None, None, _CHUNK), lambda n, h, b: (b, h, n))
        documents = pl.BlockSpec((None, _CHUNK), lambda n, h, b: (b, n))
        self.gates_of_chunk = Gates(self.row_of_chunk, self.row_of_chunk, documents)
        self.state_of_chunk = pl.BlockSpec((None, None, None, width, values), lambda n, h, b: (b, h, n, 0, 0))

    def like_values(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.length, self.heads, self.values), self.dtype)

    def like_rows(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.length), jnp.float32)

    def like_states(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.chunks, self.width, self.values), self.dtype)


class _Saved(NamedTuple):
    """Inverses [B, H, T, L], written values [B, T, H, E], and states before chunks [B, H, N, C, E]."""

    inverses: jax.Array
    new: jax.Array
    states: jax.Array


def _states(rule: _Rule) -> tuple[_Saved, jax.Array]:
    """And the state after the last chunk."""
    on = _Blocks(rule)
    inverses = _call(
        kernels.inverse_kernel,
        "gated_delta_inverses",
        (on.chunks, on.heads, on.batch),
        [on.keys_of_chunk, on.gates_of_chunk],
        pl.BlockSpec((None, None, _CHUNK, _CHUNK), lambda n, h, b: (b, h, n, 0)),
        jax.ShapeDtypeStruct((on.batch, on.heads, on.length, _CHUNK), on.dtype),
        warps=4,
    )(rule.k, rule.gates)
    new, states, final = _call(
        functools.partial(kernels.states_kernel, chunk=_CHUNK),
        "gated_delta_states",
        on.grid,
        [on.all_keys, on.all_values, on.all_gates, on.all_inverses, on.state],
        [on.all_values, on.all_states, on.state],
        [on.like_values(), on.like_states(), jax.ShapeDtypeStruct(rule.state.shape, jnp.float32)],
        **_IN_TURN,
    )(rule.k, rule.v, rule.gates, inverses, rule.state)
    return _Saved(inverses, new, states), final


@jax.custom_vjp
def _change(rule: _Rule) -> jax.Array:
    return _states(rule)[1]


def _save_change(rule: _Rule) -> tuple[jax.Array, Any]:
    saved, final = _states(rule)
    return final, (rule, saved)


def _change_back(saved: Any, d_final: jax.Array) -> tuple[_Rule]:
    rule, kept = saved
    return (_gradients(rule, kept, d_final, None)[0],)


_change.defvjp(_save_change, _change_back)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _outputs(static: _Static, rule: _Rule, q: jax.Array, z: jax.Array, scale: jax.Array) -> jax.Array:
    return _save_outputs(static, rule, q, z, scale)[0]


def _out_specs(on: _Blocks) -> tuple[list[Any], pl.BlockSpec]:
    """Blocks of inputs, and of one like z."""
    z = pl.BlockSpec((None, _CHUNK, None, on.values), lambda n, h, b: (b, n, h, 0))
    scale = pl.BlockSpec((on.values,), lambda n, h, b: (0,))
    keys, values = on.keys_of_chunk, on.values_of_chunk
    return [keys, keys, values, on.state_of_chunk, on.gates_of_chunk, z, scale], z


def _save_outputs(static: _Static, rule: _Rule, q: Any, z: Any, scale: Any) -> tuple[jax.Array, Any]:
    saved, _ = _states(rule)
    on = _Blocks(rule)
    ins, like_z = _out_specs(on)
    out = _call(
        functools.partial(kernels.outputs_kernel, **static._asdict()),
        FORWARD,
        (on.chunks, on.heads, on.batch),
        ins,
        like_z,
        jax.ShapeDtypeStruct(z.shape, z.dtype),
    )(q, rule.k, saved.new, saved.states, rule.gates, z, scale)
    return out, (rule, saved, q, z, scale)


def _outputs_back(static: _Static, residuals: Any, d_out: jax.Array) -> tuple[_Rule, jax.Array, jax.Array, jax.Array]:
    rule, saved, q, z, scale = residuals
    on = _Blocks(rule)
    ins, like_z = _out_specs(on)
    d_core, d_new, d_z, d_scale = _call(
        functools.partial(kernels.d_outputs_kernel, **static._asdict(), part=on.part),
        "gated_delta_d_outputs",
        (on.chunks, on.heads, on.batch),
        [*ins, like_z],
        [
            on.values_of_chunk,
            on.values_of_chunk,
            like_z,
            pl.BlockSpec((None, None, None, on.values), lambda n, h, b: (b, h, n, 0)),
        ],
        [
            on.like_values(),
            on.like_values(),
            jax.ShapeDtypeStruct(z.shape, z.dtype),
            jax.ShapeDtypeStruct((on.batch, on.heads, on.chunks, on.values), jnp.float32),
        ],
    )(q, rule.k, saved.new, saved.states, rule.gates, z, scale, d_out)
    no_state = jnp.zeros(rule.state.shape, jnp.float32)
    d_rule, d_q = _gradients(rule, saved, no_state, Read(q, d_core, d_new))
    return d_rule, d_q, d_z, d_scale[..., : static.width].sum((0, 1, 2))


_outputs.defvjp(_save_outputs, _outputs_back)


def _gradients(rule: _Rule, saved: _Saved, d_final: jax.Array, read: Read | None) -> tuple[_Rule, Any]:
    """Of the rule's inputs, and of queries, from those of the last state and of what is read from all states."""
    on = _Blocks(rule)
    keys, values, state = on.all_keys, on.all_values, jax.ShapeDtypeStruct(rule.state.shape, jnp.float32)
    d_wanted, d_states, d_first = _call(
        functools.partial(kernels.d_states_kernel, chunk=_CHUNK),
        "gated_delta_d_states",
        on.grid,
        [Read(keys, values, values) if read else None, keys, on.all_gates, on.all_inverses, on.state],
        [values, on.all_states, on.state],
        [on.like_values(), on.like_states(), state],
        aliases={2: 0} if read else {},  # in the place of what outputs give, which is read once
        **_IN_TURN,
    )(read, rule.k, rule.gates, saved.inverses, d_final)

    # programs of key heads
    repeats = on.repeats
    of_key = pl.BlockSpec((None, _CHUNK, None, on.width), lambda n, h, b: (b, n, h, 0))
    of_values = pl.BlockSpec((None, _CHUNK, repeats, on.values), lambda n, h, b: (b, n, h, 0))
    rows = pl.BlockSpec((None, repeats, _CHUNK), lambda n, h, b: (b, h, n))
    states = pl.BlockSpec((None, repeats, None, on.width, on.values), lambda n, h, b: (b, h, n, 0, 0))
    documents, part = on.gates_of_chunk.documents, on.part
    gates, grid = Gates(rows, rows, documents), (on.chunks, on.keys, on.batch)
    like_keys, given, d_q = jax.ShapeDtypeStruct(rule.k.shape, on.dtype), None, None
    if read:
        d_q, *given = _call(
            functools.partial(kernels.d_read_kernel, part=part),
            "gated_delta_d_read",
            grid,
            [of_key, of_key, gates, of_values, states, of_values],
            [of_key, of_key, rows],
            [like_keys, like_keys, on.like_rows()],
        )(read.q, rule.k, rule.gates, saved.new, saved.states, read.d_core)
    d_k, d_v, d_decay, d_beta = _call(
        functools.partial(kernels.d_written_kernel, part=part),
        BACKWARD,
        grid,
        [of_key, gates, Written(of_values, of_values, of_values, states, states), [of_key, rows] if given else None],
        [of_key, of_values, rows, rows],
        [like_keys, on.like_values(), on.like_rows(), on.like_rows()],
    )(rule.k, rule.gates, Written(rule.v, saved.new, d_wanted, saved.states, d_states), given)
    return _Rule(d_k, d_v, Gates(d_decay, d_beta, None), d_first), d_q
