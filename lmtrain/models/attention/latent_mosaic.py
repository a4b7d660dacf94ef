"""The attention of latents on TPUs by our own kernels, one forward and one backward, written in Pallas.

Keys of a head and those that all heads share have products of their own, and keys and values of a head are read from
one array, so that nothing is joined or cut in memory. Scores are [keys, queries]: what is reduced over keys are sums of
registers. The backward kernel computes the weights once for the gradients of keys, values and queries; those of queries
stay on the core for a head, and those of the shared keys for all heads.

A query sees a range of positions: from the start of its document, or of the window, to its own. Blocks of keys outside
of a block's ranges are skipped. On devices other than TPUs the kernels are interpreted: slow, and only for tests.

    B batch  H heads  S positions  N, R columns of queries for the keys of a head and for those of all heads
    E columns of keys and values of a head  V columns of values  n blocks  L positions of a block
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lmtrain.models.attention.attend import MASKED, Options, ranges
from lmtrain.models.layers.remat import SAVED_ATTENTION
from lmtrain.sharding.local import platform

LOG2_E = math.log2(math.e)
# What the kernels may use of a core's memory: less than any TPU from v5e on has.
CORE_BYTES = 64 * 2**20
# TPUs whose devices have two cores; others have one, and split nothing.
_CORES = 2


class Static(NamedTuple):
    """Static arguments: the scale of scores, positions of a block, and whether the kernels are interpreted."""

    scale: float
    block: int
    interpret: bool

    def call(self, kernel: Any, name: str, parallel: int, **more: Any) -> Any:
        """`pallas_call` with a grid, of which the first `parallel` dimensions can be shared by cores."""
        grid = more["grid"]
        semantics: Any = tuple("parallel" if number < parallel else "arbitrary" for number in range(len(grid)))
        names = ("grid", "in_specs", "out_specs", "scratch_shapes")
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, **{name: more.pop(name) for name in names})
        options = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=CORE_BYTES)
        return pl.pallas_call(
            kernel, name=name, grid_spec=spec, compiler_params=options, interpret=self.interpret, **more
        )


class Inputs(NamedTuple):
    """Queries, times the scale and log2(e), [B, H, S, N + R], keys and values [B, H, S, E], the shared keys [B, S, R],
    and the first key that each query sees, int32 [B, 1, S]; or blocks of them."""

    q: Any
    kv: Any
    shared: Any
    first: Any

    def sizes(self, block: int) -> tuple[int, ...]:
        """Numbers of sequences, heads and blocks; columns of queries, of a head's keys, of these with values, and of
        shared keys."""
        batch, heads, length, width = self.q.shape
        rope = self.shared.shape[-1]
        return batch, heads, length // block, width, width - rope, self.kv.shape[-1], rope


class Bounds(NamedTuple):
    """The first block of keys that each block of queries sees, and the last block of queries that sees each block of
    keys, int32 [B, n]."""

    first: Any
    last: Any


def bytes_on_core(length: int, width: int, shared: int) -> int:
    """What the backward kernel keeps on a core for a sequence, in addition to its blocks."""
    return 4 * length * sum(-(-size // 128) * 128 for size in (width, shared))


def attend_latent(
    q_BHSC: jax.Array, kv_BHSE: jax.Array, shared_B1SR: jax.Array, scale: float, options: Options, block: int
) -> jax.Array:
    """`attend` of latent attention, as in `self_attend_latent`, with blocks of this number of positions."""
    length, static = q_BHSC.shape[2], Static(scale, block, platform() != "tpu")

    def pad(x: jax.Array, axis: int, **more: Any) -> jax.Array:
        """Padding comes after all queries, so that none sees it."""
        extra = -length % block
        return jnp.pad(x, [(0, extra if axis == number else 0) for number in range(x.ndim)], **more)

    segments = jnp.zeros((len(q_BHSC), length), jnp.int32) if options.segments is None else options.segments
    first, last = ranges(pad(segments, 1, constant_values=-1), options.window)
    bounds = Bounds(first[:, ::block] // block, last[:, block - 1 :: block] // block)
    arrays = (pad(q_BHSC, 2), pad(kv_BHSE, 2), pad(shared_B1SR[:, 0], 1))
    return _attend(*arrays, first[:, None], bounds, static)[:, :, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q: Any, kv: Any, shared: Any, first: Any, bounds: Bounds, static: Static) -> jax.Array:
    return _forward(q, kv, shared, first, bounds, static)[0]


def _forward(
    q: Any, kv: Any, shared: Any, first: Any, bounds: Bounds, static: Static
) -> tuple[jax.Array, tuple[Any, ...]]:
    scaled = (q * (static.scale * LOG2_E)).astype(q.dtype)
    inputs = Inputs(scaled, kv, shared, first)
    mixed, log_sum = (checkpoint_name(part, SAVED_ATTENTION) for part in _mix(inputs, bounds, static))
    return mixed, (inputs, bounds, mixed, log_sum)


def _mix(inputs: Inputs, bounds: Bounds, static: Static) -> tuple[jax.Array, jax.Array]:
    """The mixed values [B, H, S, V], and the base 2 logarithm of the sum of exponentials, float32 [B, H, 1, S]."""
    block, length = static.block, inputs.q.shape[2]
    batch, heads, blocks, width, nope, expanded, rope = inputs.sizes(block)
    values = expanded - nope

    def of_queries(b: Any, h: Any, i: Any, j: Any, *bounds: Any) -> tuple[Any, ...]:
        return b, h, i, 0

    def of_keys(b: Any, h: Any, i: Any, j: Any, first: Any, last: Any) -> tuple[Any, ...]:
        return b, h, jnp.clip(j, first[b, i], i), 0

    def of_all(b: Any, h: Any, i: Any, j: Any, first: Any, last: Any) -> tuple[Any, ...]:
        return b, jnp.clip(j, first[b, i], i), 0

    def row(b: Any, h: Any, i: Any, j: Any, *bounds: Any) -> tuple[Any, ...]:
        return b, 0, i

    mixed, log_sum = static.call(
        functools.partial(_mix_kernel, nope=nope, block=block),
        "latent_attention_forward",
        parallel=3,
        grid=(batch, heads, blocks, blocks),
        in_specs=[
            pl.BlockSpec((None, None, block, width), of_queries),
            pl.BlockSpec((None, None, block, expanded), of_keys),
            pl.BlockSpec((None, block, rope), of_all),
            pl.BlockSpec((None, 1, block), row),
        ],
        out_specs=[
            pl.BlockSpec((None, None, block, values), of_queries),
            pl.BlockSpec((None, None, 1, block), lambda b, h, i, j, *bounds: (b, h, 0, i)),
        ],
        scratch_shapes=[
            pltpu.VMEM((1, block), jnp.float32),
            pltpu.VMEM((1, block), jnp.float32),
            pltpu.VMEM((values, block), jnp.float32),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, length, values), inputs.q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ],
    )(*bounds, *inputs)
    return mixed, log_sum


def _mix_kernel(
    first_ref: Any,
    last_ref: Any,
    q_ref: Any,
    kv_ref: Any,
    shared_ref: Any,
    row_ref: Any,
    mixed_ref: Any,
    log_sum_ref: Any,
    highest_ref: Any,
    total_ref: Any,
    sums_ref: Any,
    *,
    nope: int,
    block: int,
) -> None:
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(j == 0)
    def _begin() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, MASKED)
        total_ref[...] = jnp.zeros_like(total_ref)
        sums_ref[...] = jnp.zeros_like(sums_ref)

    @pl.when((j >= first_ref[b, i]) & (j <= i))
    def _add() -> None:
        q, kv = q_ref[...], kv_ref[...]
        s = _scores(q, kv, shared_ref[...], row_ref[...], nope, i * block, j * block)
        highest = highest_ref[...]
        higher = jnp.maximum(highest, s.max(0, keepdims=True))
        weights, shrink = jnp.exp2(s - higher), jnp.exp2(highest - higher)
        highest_ref[...] = higher
        total_ref[...] = total_ref[...] * shrink + weights.sum(0, keepdims=True)
        sums_ref[...] = sums_ref[...] * shrink + _dot(kv[:, nope:], weights.astype(kv.dtype), 0, 0)

    @pl.when(j == i)
    def _end() -> None:
        total = total_ref[...]
        mixed_ref[...] = (sums_ref[...] / total).T.astype(mixed_ref.dtype)
        log_sum_ref[...] = highest_ref[...] + jnp.log2(total)


def _scores(q: Any, kv: Any, shared: Any, first_row: Any, nope: int, query: Any, key: Any) -> jax.Array:
    """Base 2 scores [keys, queries] of blocks that begin at these positions."""
    s = _dot(kv[:, :nope], q[:, :nope], 1, 1) + _dot(shared, q[:, nope:], 1, 1)
    key_at = key + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
    query_at = query + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    return jnp.where((key_at >= first_row) & (key_at <= query_at), s, MASKED)


def _dot(left: Any, right: Any, of_left: int, of_right: int) -> jax.Array:
    """The product over one dimension of each, in float32."""
    return jax.lax.dot_general(left, right, (((of_left,), (of_right,)), ((), ())), preferred_element_type=jnp.float32)


def _backward(static: Static, saved: Any, d_mixed: jax.Array) -> tuple[Any, ...]:
    """With p the weights: dv = p^T do, dp = do v^T, ds = p (dp - sum(do o)), dq = scale ds k, dk = scale ds^T q."""
    inputs, bounds, mixed, log_sum = saved
    block = static.block
    batch, heads, blocks, width, nope, expanded, rope = inputs.sizes(block)
    values = expanded - nope
    cores = math.gcd(heads, _CORES)
    each = heads // cores
    mean = (d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32)).sum(-1)[:, :, None]
    d_mixed = d_mixed.astype(inputs.q.dtype)

    def at(b: Any, j: Any, i: Any, last: Any) -> Any:
        return jnp.clip(i, j, last[b, j])

    def of_queries(c: Any, b: Any, h: Any, j: Any, i: Any, first: Any, last: Any) -> tuple[Any, ...]:
        return b, c * each + h, at(b, j, i, last), 0

    def of_rows(c: Any, b: Any, h: Any, j: Any, i: Any, first: Any, last: Any) -> tuple[Any, ...]:
        return b, c * each + h, 0, at(b, j, i, last)

    def row(c: Any, b: Any, h: Any, j: Any, i: Any, first: Any, last: Any) -> tuple[Any, ...]:
        return b, 0, at(b, j, i, last)

    def of_keys(c: Any, b: Any, h: Any, j: Any, i: Any, *bounds: Any) -> tuple[Any, ...]:
        return b, c * each + h, j, 0

    # a block is written once, when it is complete: until then its place is that of the first
    def d_of_queries(c: Any, b: Any, h: Any, j: Any, i: Any, *bounds: Any) -> tuple[Any, ...]:
        return b, c * each + h, jnp.where(j == blocks - 1, i, 0), 0

    def d_of_all(c: Any, b: Any, h: Any, j: Any, i: Any, *bounds: Any) -> tuple[Any, ...]:
        return c, b, jnp.where(h == each - 1, j, 0), 0

    d_q, d_kv, d_shared = static.call(
        functools.partial(_backward_kernel, nope=nope, block=block, scale=static.scale),
        "latent_attention_backward",
        parallel=2,
        grid=(cores, batch, each, blocks, blocks),
        in_specs=[
            pl.BlockSpec((None, None, block, width), of_queries),
            pl.BlockSpec((None, None, block, expanded), of_keys),
            pl.BlockSpec((None, block, rope), lambda c, b, h, j, i, *bounds: (b, j, 0)),
            pl.BlockSpec((None, 1, block), row),
            pl.BlockSpec((None, None, 1, block), of_rows),
            pl.BlockSpec((None, None, 1, block), of_rows),
            pl.BlockSpec((None, None, block, values), of_queries),
        ],
        out_specs=[
            pl.BlockSpec((None, None, block, width), d_of_queries),
            pl.BlockSpec((None, None, block, expanded), of_keys),
            pl.BlockSpec((None, None, block, rope), d_of_all),
        ],
        scratch_shapes=[
            pltpu.VMEM((blocks, block, width), jnp.float32),
            pltpu.VMEM((block, expanded), jnp.float32),
            pltpu.VMEM((blocks, block, rope), jnp.float32),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(inputs.q.shape, inputs.q.dtype),
            jax.ShapeDtypeStruct(inputs.kv.shape, inputs.kv.dtype),
            jax.ShapeDtypeStruct((cores, *inputs.shared.shape), jnp.float32),
        ],
    )(*bounds, *inputs, log_sum, mean, d_mixed)
    return d_q, d_kv, d_shared.sum(0).astype(inputs.shared.dtype), None, None


def _backward_kernel(
    first_ref: Any,
    last_ref: Any,
    q_ref: Any,
    kv_ref: Any,
    shared_ref: Any,
    row_ref: Any,
    log_sum_ref: Any,
    mean_ref: Any,
    d_ref: Any,
    d_q_ref: Any,
    d_kv_ref: Any,
    d_shared_ref: Any,
    of_queries_ref: Any,
    of_keys_ref: Any,
    of_shared_ref: Any,
    *,
    nope: int,
    block: int,
    scale: float,
) -> None:
    b, h, j, i = (pl.program_id(number) for number in range(1, 5))
    heads, blocks = pl.num_programs(2), pl.num_programs(3)

    @pl.when(i == 0)
    def _begin() -> None:
        of_keys_ref[...] = jnp.zeros_like(of_keys_ref)

        @pl.when(j == 0)
        def _begin_head() -> None:
            of_queries_ref[...] = jnp.zeros_like(of_queries_ref)

        @pl.when(h == 0)
        def _begin_sequence() -> None:
            of_shared_ref[j] = jnp.zeros_like(of_shared_ref[j])

    @pl.when((i >= j) & (i <= last_ref[b, j]))
    def _add() -> None:
        q, kv, shared, d = q_ref[...], kv_ref[...], shared_ref[...], d_ref[...]
        weights = jnp.exp2(_scores(q, kv, shared, row_ref[...], nope, i * block, j * block) - log_sum_ref[...])
        of_keys_ref[:, nope:] += _dot(weights.astype(d.dtype), d, 1, 0)
        d_scores = (weights * (_dot(kv[:, nope:], d, 1, 1) - mean_ref[...])).astype(q.dtype)
        of_keys_ref[:, :nope] += _dot(d_scores, q[:, :nope], 1, 0)
        of_shared_ref[j] += _dot(d_scores, q[:, nope:], 1, 0)
        of_queries_ref[i, :, :nope] += _dot(d_scores, kv[:, :nope], 0, 0)
        of_queries_ref[i, :, nope:] += _dot(d_scores, shared, 0, 0)

    @pl.when(i == blocks - 1)
    def _end() -> None:
        d_kv_ref[:, :nope] = (of_keys_ref[:, :nope] * (1 / LOG2_E)).astype(d_kv_ref.dtype)
        d_kv_ref[:, nope:] = of_keys_ref[:, nope:].astype(d_kv_ref.dtype)

        @pl.when(h == heads - 1)
        def _end_shared() -> None:
            d_shared_ref[...] = of_shared_ref[j] * (1 / LOG2_E)

    @pl.when(j == blocks - 1)
    def _end_queries() -> None:
        d_q_ref[...] = (of_queries_ref[i] * scale).astype(d_q_ref.dtype)


_attend.defvjp(_forward, _backward)
