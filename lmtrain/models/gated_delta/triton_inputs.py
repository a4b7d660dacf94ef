"""The convolution before the gated delta rule, its activation, and the lengths of queries and keys, as one kernel each
way for NVIDIA GPUs, in Pallas. On other devices it is interpreted: slow, and only for tests.

    B batch  T positions  H heads  C width of a head  W taps
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from lmtrain.sharding.local import platform

# The smallest dimension of a product.
SMALLEST = 16

# Positions of a program of the forward kernel; of a step of one of the backward kernel, which takes `_STEPS` steps:
# each computes its positions once for every tap, from inputs that the first read into a cache.
_ROWS = 32
_ROWS_BACK, _STEPS = 16, 16


class Unit(NamedTuple):
    """Vectors get this length. `epsilon` is added to their squared lengths."""

    epsilon: float
    length: float


def tile_of(width: int) -> int:
    """Columns of the arrays of a head, as the products of kernels need them: those after `width` are 0."""
    return max(int(pl.next_power_of_2(width)), SMALLEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolved(unit: Unit | None, x_BTHC: jax.Array, taps_WHC: jax.Array, within_BT: jax.Array) -> jax.Array:
    """silu(sum over w of taps[W - 1 - w] * x at w positions before), [B, T, H, tile], in the dtype of `x`; with `unit`
    of that length. `within` are positions in documents: earlier documents are not seen."""
    batch, length, heads, width = x_BTHC.shape
    rows, tile = min(_ROWS, int(pl.next_power_of_2(length))), tile_of(width)
    result: jax.Array = _call(
        functools.partial(_forward_kernel, unit=unit, rows=rows, length=length, width=width),
        "gated_delta_inputs",
        grid=(pl.cdiv(length, rows), heads, batch),
        in_specs=_specs(length, len(taps_WHC), tile),
        out_specs=pl.BlockSpec((None, length, None, tile), lambda i, h, b: (b, 0, h, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, length, heads, tile), x_BTHC.dtype),
    )(x_BTHC, _padded(taps_WHC), within_BT)
    return result


def _save(unit: Unit | None, x: jax.Array, taps: jax.Array, within: jax.Array) -> tuple[jax.Array, Any]:
    return convolved(unit, x, taps, within), (x, taps, within)


def _back(unit: Unit | None, saved: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, taps, within = saved
    (batch, length, heads, width), number = x.shape, len(taps)
    tile, rows = tile_of(width), _ROWS_BACK * _STEPS
    of_taps = pl.BlockSpec((None, None, number, None, tile), lambda i, h, b: (b, i, 0, h, 0))
    whole = pl.BlockSpec((None, length, None, tile), lambda i, h, b: (b, 0, h, 0))
    d_x, d_taps = _call(
        functools.partial(_backward_kernel, unit=unit, length=length, width=width),
        "gated_delta_d_inputs",
        grid=(pl.cdiv(length, rows), heads, batch),
        in_specs=[*_specs(length, number, tile), whole],
        out_specs=[whole, of_taps],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((batch, pl.cdiv(length, rows), number, heads, tile), jnp.float32),
        ],
    )(x, _padded(taps), within, d_out)
    return d_x, d_taps.sum((0, 1))[..., :width].astype(taps.dtype), None


convolved.defvjp(_save, _back)


def _padded(taps_WHC: jax.Array) -> jax.Array:
    width = taps_WHC.shape[2]
    return jnp.pad(taps_WHC.astype(jnp.float32), ((0, 0), (0, 0), (0, tile_of(width) - width)))


def _specs(length: int, taps: int, tile: int) -> list[pl.BlockSpec]:
    return [
        pl.BlockSpec((None, length, None, tile), lambda i, h, b: (b, 0, h, 0)),
        pl.BlockSpec((taps, None, tile), lambda i, h, b: (0, h, 0)),
        pl.BlockSpec((None, length), lambda i, h, b: (b, 0)),
    ]


def _call(kernel: Any, name: str, **more: Any) -> Any:
    options = plgpu.CompilerParams(num_warps=4, num_stages=1)
    return pl.pallas_call(kernel, name=name, compiler_params=options, interpret=platform() != "gpu", **more)


class _Tile(NamedTuple):
    """Of some positions: which are in the sequence, their positions in documents, what each tap sees, the sum before
    the activation, and the share of it that the activation keeps."""

    at: Any
    is_real: Any
    within: Any
    seen: list[Any]
    total: Any
    share: Any


def _load(ref: Any, rows: Any, mask: Any) -> Any:
    """These rows in float32, 0 where `mask` is not set."""
    at = jnp.broadcast_to(rows[:, None], mask.shape), jnp.broadcast_to(jnp.arange(mask.shape[1])[None, :], mask.shape)
    return plgpu.load(ref.at[at], mask=mask, other=0.0).astype(jnp.float32)


def _tile_at(at: Any, x: Any, taps: Any, within: Any, length: int, here: Any) -> _Tile:
    is_real = at < length
    at = jnp.minimum(at, length - 1)
    positions = plgpu.load(within.at[at])
    seen = []
    number = taps.shape[0]
    for back in range(number):
        is_seen = (is_real & (positions >= back))[:, None] & here
        seen.append(_load(x, jnp.maximum(at - back, 0), is_seen))
    total = seen[0] * taps[number - 1, :][None, :]
    for back in range(1, number):
        total += seen[back] * taps[number - 1 - back, :][None, :]
    return _Tile(at, is_real, positions, seen, total, 1 / (1 + jnp.exp(-total)))


def _length_factor(x: Any, unit: Unit) -> Any:
    """[rows], for vectors of length 1."""
    return jax.lax.rsqrt(jnp.sum(x * x, axis=1) + unit.epsilon)


def _forward_kernel(
    x: Any, taps: Any, within: Any, out: Any, *, unit: Unit | None, rows: int, length: int, width: int
) -> None:
    here, at = (jnp.arange(out.shape[1]) < width)[None, :], pl.program_id(0) * rows + jnp.arange(rows)
    tile = _tile_at(at, x, taps, within, length, here)
    activated = tile.total * tile.share
    if unit is not None:
        activated *= (_length_factor(activated, unit) * unit.length)[:, None]
    is_real = jnp.broadcast_to(tile.is_real[:, None], activated.shape)
    plgpu.store(out.at[pl.ds(pl.program_id(0) * rows, rows), :], activated.astype(out.dtype), mask=is_real)


def _backward_kernel(
    x: Any, taps: Any, within: Any, d_out: Any, d_x: Any, d_taps: Any, *, unit: Unit | None, length: int, width: int
) -> None:
    here, number_of_taps = (jnp.arange(d_x.shape[1]) < width)[None, :], taps.shape[0]

    begin = pl.program_id(0) * _STEPS * _ROWS_BACK

    def step(number: Any, sums: Any) -> Any:
        first = begin + number * _ROWS_BACK
        gradient = jnp.zeros((_ROWS_BACK, d_x.shape[1]), jnp.float32)
        for ahead in range(number_of_taps):
            tile = _tile_at(first + ahead + jnp.arange(_ROWS_BACK), x, taps, within, length, here)
            mask = tile.is_real[:, None] & here
            d = _load(d_out, tile.at, mask)
            if unit is not None:
                activated = tile.total * tile.share
                factor = _length_factor(activated, unit)
                along = factor * factor * jnp.sum(d * activated, axis=1)
                d = (d - activated * along[:, None]) * (factor * unit.length)[:, None]
            d = d * tile.share * (1 + tile.total * (1 - tile.share))
            gradient += (
                jnp.where((tile.within >= ahead)[:, None], d, 0.0) * taps[number_of_taps - 1 - ahead, :][None, :]
            )
            if ahead == 0:
                sums = [total + jnp.sum(d * seen, axis=0) for total, seen in zip(sums, tile.seen, strict=True)]
        at = first + jnp.arange(_ROWS_BACK)
        plgpu.store(d_x.at[pl.ds(first, _ROWS_BACK), :], gradient.astype(d_x.dtype), mask=(at < length)[:, None] & here)
        return sums

    zeros = [jnp.zeros((d_x.shape[1],), jnp.float32) for _ in range(number_of_taps)]
    sums = jax.lax.fori_loop(0, _STEPS, step, zeros)
    for back, total in enumerate(sums):
        d_taps[number_of_taps - 1 - back, :] = total
