"""Frozen matrices in 4 bits, as in QLoRA (Dettmers et al. 2023) and bitsandbytes, whose values these are.

A matrix is stored in blocks of 64 inputs of one output. Each number is one of 16 levels times the block's largest
magnitude:

    nf4     quantiles of the normal distribution, with 0 and both ends
    int4    -7/7, -6/7, ..., 7/7

The largest magnitudes are stored in 8 bits, too ("double quantization"): less their mean, in blocks of 256, by a code
book whose steps grow with the magnitude (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"). That is
0.52 bytes for each number. Blocks of 256 follow the outputs: those of a transposed matrix in Hugging Face's layout.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

_BLOCK = 64
_NESTED = 256
# The smallest normal float32: processors may take smaller ones as 0.
_TINY = float(np.finfo(np.float32).tiny)
# Appendix E of the paper.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# By the name of a format, which is that of the array of codes, too.
LEVELS: dict[str, tuple[float, ...]] = {"nf4": _NF4, "int4": tuple(level / 7 for level in range(-8, 8))}
# Names of the other arrays.
ARRAYS = ("scale", "nested", "offset")


@functools.cache
def code_book() -> np.ndarray:
    """The 256 numbers of the dynamic 8-bit type, float32 ascending: 7 decades, of which larger ones have more steps."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        means = (np.arange(2**decade) + 0.5) * 0.9 / 2**decade + 0.1
        means = means.astype(np.float32) * np.float32(10.0 ** (decade - 6))
        numbers += [*means.tolist(), *(-means).tolist()]
    return np.sort(np.array(numbers, np.float32))


class Blocks(struct.PyTreeNode):
    """A matrix of `shape`, [*inputs, *outputs], in 4 bits.

    `codes` uint8 [blocks, half a block, *outputs], two numbers in each byte; `scale` uint8 [blocks, *outputs];
    `nested` float32 [blocks of scales], and their mean, `offset`.
    """

    codes: jax.Array
    scale: jax.Array
    nested: jax.Array
    offset: jax.Array
    kind: str = struct.field(pytree_node=False)
    shape: tuple[int, ...] = struct.field(pytree_node=False)

    def numbers(self, dtype: Any) -> jax.Array:
        """The matrix in `dtype`."""
        codes = jnp.concatenate([self.codes >> 4, self.codes & 15], axis=1)
        blocks = self.scale.shape[0]
        nested = jnp.broadcast_to(self.nested[:, None], (len(self.nested), _NESTED)).reshape(-1)[: self.scale.size]
        scale = jnp.asarray(code_book()).at[self.scale.astype(jnp.int32)].get(mode="promise_in_bounds")
        scale = scale * nested.reshape(-1, blocks).T.reshape(self.scale.shape) + self.offset
        return (_level(codes, LEVELS[self.kind]) * scale[:, None]).astype(dtype).reshape(self.shape)


def _level(codes: jax.Array, levels: tuple[float, ...]) -> jax.Array:
    """The level of each code, by a tree of selections: accelerators look up single numbers slowly.

    The first selections are between constants, by their bits: as arrays, they would be computed once before a loop over
    layers, and take more memory than the matrices.
    """
    bits = [int(number) for number in np.array(levels, np.float32).view(np.int32)]
    is_odd = -(codes & 1).astype(jnp.int32)  # all bits
    pairs = [(is_odd & (even ^ odd)) ^ even for even, odd in zip(bits[::2], bits[1::2], strict=True)]
    values = [jax.lax.bitcast_convert_type(pair, jnp.float32) for pair in pairs]
    for bit in range(1, 4):
        is_set = (codes >> bit) & 1 == 1
        values = [jnp.where(is_set, odd, even) for even, odd in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def block_size(inputs: int) -> int:
    """64, or the largest even divisor of an unusual number of inputs below it."""
    return next((size for size in range(_BLOCK, 1, -2) if inputs % size == 0), 0)


@functools.partial(jax.jit, static_argnums=(1, 2))
def in_blocks(matrix: jax.Array, outputs: int, kind: str) -> Blocks:
    """A matrix [*inputs, *outputs] in 4 bits; `outputs` is the number of its last dimensions that are outputs."""
    shape = matrix.shape[matrix.ndim - outputs :]
    size = block_size(matrix.size // int(np.prod(shape)))
    values = matrix.astype(jnp.float32).reshape(-1, size, *shape)
    largest = jnp.max(jnp.abs(values), axis=1)
    scaled = values * (1.0 / jnp.maximum(largest, _TINY))[:, None]
    levels = np.array(LEVELS[kind], np.float32)
    codes = _nearest(scaled, levels[1:] if kind == "int4" else levels) + (kind == "int4")
    codes = codes.astype(jnp.uint8)
    blocks = len(values)
    offset = jnp.mean(largest)
    by_output = jnp.ravel(jnp.moveaxis((largest - offset).reshape(blocks, -1), 0, 1))
    padded = jnp.pad(by_output, (0, -len(by_output) % _NESTED)).reshape(-1, _NESTED)
    nested = jnp.max(jnp.abs(padded), axis=1)
    book = jnp.asarray(code_book())
    scales = jnp.clip(padded * (1.0 / jnp.maximum(nested, _TINY))[:, None], -1, 1)
    scale = jnp.searchsorted((book[1:] + book[:-1]) / 2, scales.ravel()[: len(by_output)])
    scale = jnp.moveaxis(scale.reshape(-1, blocks), 0, 1).reshape(blocks, *shape).astype(jnp.uint8)
    packed = codes[:, : size // 2] << 4 | codes[:, size // 2 :]
    return Blocks(packed, scale, nested, offset, kind, matrix.shape)


def _nearest(values: jax.Array, levels: np.ndarray) -> jax.Array:
    """The number of the nearest level, by comparisons with the middles between levels."""
    middles = ((levels[1:] + levels[:-1]) / 2).tolist()
    found: jax.Array = sum((values > middle).astype(jnp.uint8) for middle in middles)
    return found
