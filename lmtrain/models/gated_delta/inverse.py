"""(I + a)^-1 of strictly lower triangular matrices, as exact as substitution: neighbouring blocks of known inverses are
joined, from the diagonal on. The product (I - a) (I + a^2) (I + a^4) ... has as few products, and errors of up to 1e30
for a repeated token.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

# The only values of a chunk that the gradient keeps.
INVERSE = "gated_delta_inverse"

# Products of float32 on a TPU: 16 bits in three passes. In one, as by default, the inverse would be the largest error.
EXACT = jax.lax.Precision.HIGH

# Rows of a register of a TPU with 32 bits.
ROWS = 8


@jax.custom_vjp
def unit_inverse(a: jax.Array) -> jax.Array:
    """The inverses of matrices [..., L, L], by XLA's operations."""
    return _joined_blocks(a)


def _joined_blocks(a: jax.Array) -> jax.Array:
    first, *rest = _joins(a.shape[-1])
    inverse = jnp.eye(a.shape[-1], dtype=a.dtype) - jnp.where(first, a, 0)
    for join in rest:
        between = jnp.matmul(inverse, jnp.where(join, a, 0), precision=EXACT)
        inverse = inverse - jnp.matmul(between, inverse, precision=EXACT)
    return inverse


def _joins(length: int) -> Iterator[np.ndarray]:
    """For blocks of 1, 2, 4, ...: the entries below the diagonal that join two neighbouring blocks."""
    i, size = np.arange(length), 1
    while size < max(length, 2):
        yield (i[:, None] // (2 * size) == i // (2 * size)) & (i[:, None] // size > i // size)
        size *= 2


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = checkpoint_name(_joined_blocks(a), INVERSE)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, d_inverse: jax.Array) -> tuple[jax.Array]:
    transposed = inverse.swapaxes(-1, -2)
    d_a = jnp.matmul(jnp.matmul(transposed, d_inverse, precision=EXACT), transposed, precision=EXACT)
    return (-jnp.tril(d_a, -1),)


unit_inverse.defvjp(_inverse_forward, _inverse_backward)


def dot(x: jax.Array, y: jax.Array, sides: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product over these dimensions inside a kernel, exact for float32 operands."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (((sides[0],), (sides[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def inverses_of(matrices: list[jax.Array], dtype: Any, has_slices: bool = True) -> list[jax.Array]:
    """The inverses of float32 matrices inside a kernel. They take turns: each product waits for the one before it, so
    that the matrix units would idle with one alone. `has_slices`: the compiler of the kernel can cut out rows.

    With 16-bit `dtype` the products have 16-bit operands, and the result T is corrected: with R = I - (I + a) T, whose
    product has three times 16 bits, it is T (I + R + R^2). Its error is on average at most about that of rounding it
    to 16 bits, also for equal keys with strengths of 2; every product in three parts would take twice as long.
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
        is_cut = has_slices and width >= ROWS
        lower = [_every_second(inverse, width) if is_cut else inverse for inverse in found]
        halves = [dot(rows.astype(dtype), join).astype(dtype) for rows, join in zip(lower, joins, strict=True)]
        lower = [rows - dot(half, whole) for rows, half, whole in zip(lower, halves, wholes, strict=True)]
        if is_cut:
            found = [_with_second(inverse, rows, width) for inverse, rows in zip(found, lower, strict=True)]
        else:
            found = lower
        level += 1
    if dtype == jnp.float32:
        return found
    errors = [identity - inverse - _product(a, inverse, dtype) for a, inverse in zip(matrices, found, strict=True)]
    squares = [dot(error.astype(dtype), error.astype(dtype)) for error in errors]
    return [
        inverse + dot(inverse.astype(dtype), (error + square).astype(dtype))
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
    (x_high, x_low), (y_high, y_low) = parts_of(x, dtype), parts_of(y, dtype)
    return dot(x_high, y_high) + (dot(x_high, y_low) + dot(x_low, y_high))


def parts_of(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Two arrays of 16 bits, whose sum is about `x`."""
    high = x.astype(dtype)
    return high, (x - high.astype(jnp.float32)).astype(dtype)
