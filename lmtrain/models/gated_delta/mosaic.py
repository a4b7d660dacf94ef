"""What a layer of Gated DeltaNet computes between its projections, as two kernels for TPUs in Pallas, one forward and
one backward: convolutions, lengths of queries and keys, the rule, and the norm with its gate. In parts, each would read
and write more than the projections do. Elsewhere they are interpreted: slow, and only for tests.

A program has the chunks of a few key heads, one after another; the states and the last inputs of the convolutions stay
in the memory of the core. The forward kernel saves what the backward kernel cannot compute again without the chunks
before it, the states, and what is dear, the inverses. The backward kernel goes through the chunks from the last one on.

    B batch  T positions  L positions of a chunk  N chunks  K key heads  R value heads of a key head  H value heads
    C width of keys  E width of values  W taps
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmtrain.models.gated_delta.config import BACKWARD, FORWARD
from lmtrain.models.gated_delta.inverse import ROWS
from lmtrain.models.gated_delta.mosaic_kernels import backward_kernel, forward_kernel
from lmtrain.models.gated_delta.mosaic_parts import Sizes
from lmtrain.sharding.local import platform

# Lanes of a register: the widths of heads are padded to multiples of them.
_LANES = 128

# Rows of a block of inputs of 16 bits, of which the last are those before a chunk.
_BEFORE = 16

# Value heads of a program, of 128 columns: each product of one waits for the one before it, so that the matrix units
# would idle. With 8, the backward kernel is no faster, and needs more than 16 MiB on the core.
_CHAINS = 4
# The largest that programs with many value heads of a key head need; all TPUs from v4 on have it.
_CORE_BYTES = 32 * 2**20


def mix(
    raw: tuple[Any, ...],
    taps: tuple[Any, Any, Any],
    g_BTH: Any,
    beta_BTH: Any,
    starts_BT: Any,
    within_BT: Any,
    scale_E: Any,
    epsilons: tuple[float, float],
    chunk: int,
) -> jax.Array:
    """[B, T, H E] in the dtype of `raw`: see `devices.mix`. `chunk` is a multiple of 16."""
    (batch, length), (keys, key_dim), (heads, value_dim) = within_BT.shape, taps[1].shape[1:], taps[2].shape[1:]
    repeats, chunks = heads // keys, -(-length // chunk)
    width, values = (-(-size // _LANES) * _LANES if platform() == "tpu" else size for size in (key_dim, value_dim))
    chains = repeats * max(-(-values // _LANES), 1)
    group = max(size for size in range(1, keys + 1) if keys % size == 0 and size * chains <= max(_CHAINS, chains))
    sizes = Sizes(chunk, chunks, keys, group, repeats, width, values, key_dim, value_dim, *epsilons)

    def padded(x: jax.Array, dim: int, to: int) -> jax.Array:
        """[B, T, heads times dim] -> [B, N L, heads times to]"""
        if length % chunk:
            x = jnp.pad(x, ((0, 0), (0, -length % chunk), (0, 0)))
        if dim == to:
            return x
        x = jnp.pad(x.reshape(*x.shape[:2], -1, dim), ((0, 0), (0, 0), (0, 0), (0, to - dim)))
        return x.reshape(*x.shape[:2], -1)

    def rows(x: jax.Array) -> jax.Array:
        """[B, T, H] -> [B, K, N, R, L], as rows of positions"""
        x = jnp.pad(x, ((0, 0), (0, -length % chunk), (0, 0)))
        return x.reshape(batch, chunks, chunk, keys, repeats).transpose(0, 3, 1, 4, 2)

    def of_positions(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -length % chunk))).reshape(batch, chunks, 1, chunk)

    to = width, width, values, values
    dims = key_dim, key_dim, value_dim, value_dim
    inputs = [padded(x, dim, size) for x, dim, size in zip(raw, dims, to, strict=True)]
    kernels = [
        jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, size - x.shape[2]))).reshape(len(x), -1)
        for x, size in zip(taps, to[:3], strict=True)
    ]
    documents = jnp.cumsum(of_positions(starts_BT), -1, dtype=jnp.int32)
    positions = of_positions(jnp.minimum(within_BT, len(taps[0]))).astype(jnp.int32)
    factor = jnp.pad(scale_E.astype(jnp.float32), (0, values - value_dim))[None]
    decay = jnp.cumsum(rows(g_BTH), -1)
    out = _mix(sizes, *inputs, *kernels, decay, rows(beta_BTH), documents, positions, factor)
    out = out[:, :length]
    if values == value_dim:
        return out
    return out.reshape(batch, length, heads, values)[..., :value_dim].reshape(batch, length, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(sizes: Sizes, *inputs: jax.Array) -> jax.Array:
    """[B, T, H E]"""
    (out,) = _forward(sizes, inputs, saves=False)
    result: jax.Array = out
    return result


def _save(sizes: Sizes, *inputs: jax.Array) -> tuple[Any, Any]:
    out, *saved = _forward(sizes, inputs, saves=True)
    return out, (*inputs, *saved)


class _Blocks:
    """The blocks of a program's arrays, by name."""

    def __init__(self, sizes: Sizes, taps: int, is_reversed: bool) -> None:
        chunk, chunks, _, group, repeats, width, values = sizes[:7]

        def at(number: Any) -> Any:
            return chunks - 1 - number if is_reversed else number

        def tokens(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, chunk, columns), lambda b, h, c: (b, at(c), h))

        def before(columns: int) -> pl.BlockSpec:
            last = chunk // _BEFORE
            return pl.BlockSpec((1, _BEFORE, columns), lambda b, h, c: (b, jnp.maximum(at(c) * last - 1, 0), h))

        def of_chunk(*shape: int) -> pl.BlockSpec:
            return pl.BlockSpec((1, group, 1, *shape), lambda b, h, c: (b, h, at(c), *(0 for _ in shape)))

        columns = group * width, group * width, group * repeats * values
        self.raw = [tokens(size) for size in columns]
        self.before = [before(size) for size in columns]
        self.z = tokens(columns[2])
        self.taps = [pl.BlockSpec((taps, size), lambda b, h, c: (0, h)) for size in columns]
        self.d_taps = [pl.BlockSpec((1, taps, size), lambda b, h, c: (b, 0, h)) for size in columns]
        self.rows = of_chunk(repeats, chunk)
        self.positions = pl.BlockSpec((1, 1, 1, chunk), lambda b, h, c: (b, at(c), 0, 0))
        self.scale = pl.BlockSpec((1, values), lambda b, h, c: (0, 0))
        self.d_scale = pl.BlockSpec((1, 1, 1, values), lambda b, h, c: (b, h, 0, 0))
        self.states = of_chunk(repeats, width, values)
        self.inverses = of_chunk(repeats, chunk, chunk)
        self.columns = columns

    @property
    def inputs(self) -> list[pl.BlockSpec]:
        row, position = self.rows, self.positions
        return [*self.raw, self.z, *self.taps, row, row, position, position, self.scale]


def _call(kernel: Any, name: str, sizes: Sizes, batch: int, ins: Any, outs: Any, shapes: Any, scratch: Any) -> Any:
    states = pltpu.VMEM((sizes.group, sizes.repeats, sizes.width, sizes.values), jnp.float32)
    return pl.pallas_call(
        functools.partial(kernel, sizes=sizes),
        name=name,
        grid=(batch, sizes.keys // sizes.group, sizes.chunks),
        in_specs=ins,
        out_specs=outs,
        out_shape=shapes,
        scratch_shapes=[states, *scratch],
        interpret=platform() != "tpu",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_CORE_BYTES
        ),
    )


def _forward(sizes: Sizes, inputs: tuple[jax.Array, ...], saves: bool) -> Any:
    v, batch, blocks = inputs[2], len(inputs[0]), _Blocks(sizes, len(inputs[4]), False)
    outs, shapes = [blocks.z], [jax.ShapeDtypeStruct(v.shape, v.dtype)]
    if saves:
        lead = batch, sizes.keys, sizes.chunks, sizes.repeats
        outs += [blocks.states, blocks.inverses]
        shapes.append(jax.ShapeDtypeStruct((*lead, sizes.width, sizes.values), v.dtype))
        shapes.append(jax.ShapeDtypeStruct((*lead, sizes.chunk, sizes.chunk), v.dtype))
    scratch = [pltpu.VMEM((ROWS, size), jnp.float32) for size in blocks.columns]
    call = _call(forward_kernel, FORWARD, sizes, batch, blocks.inputs, outs, shapes, scratch)
    return call(*inputs)


def _backward(sizes: Sizes, saved: tuple[jax.Array, ...], d_out: jax.Array) -> tuple[Any, ...]:
    *inputs, states, inverses = saved
    raw, z, taps, decay, beta, scale = inputs[:3], inputs[3], inputs[4:7], inputs[7], inputs[8], inputs[11]
    batch, number = len(z), len(taps[0])
    blocks = _Blocks(sizes, number, True)
    ins = [*blocks.inputs, blocks.states, blocks.inverses, *blocks.before, blocks.z]
    outs = [*blocks.raw, blocks.z, *blocks.d_taps, blocks.rows, blocks.rows, blocks.d_scale]
    like = jax.ShapeDtypeStruct
    shapes = [
        *(like(x.shape, x.dtype) for x in (*raw, z)),
        *(like((batch, *x.shape), jnp.float32) for x in taps),
        *(like(x.shape, jnp.float32) for x in (decay, beta)),
        like((batch, sizes.keys // sizes.group, 1, sizes.values), jnp.float32),
    ]
    scratch = [pltpu.VMEM((max(number - 1, 1), ROWS, size), jnp.float32) for size in blocks.columns]
    call = _call(backward_kernel, BACKWARD, sizes, batch, ins, outs, shapes, scratch)
    found = call(*inputs, states, inverses, *raw, d_out.astype(z.dtype))
    d_taps = [each.sum(0) for each in found[4:7]]
    return (*found[:4], *d_taps, *found[7:9], None, None, found[9].sum((0, 1)).reshape(scale.shape))


_mix.defvjp(_save, _backward)
