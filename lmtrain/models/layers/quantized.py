"""Matrix products of 8-bit numbers with derivatives, and the 8-bit copies of the parameters that they use.

A tensor x is stored as x / scale in 8 bits, with one scale for a layer's matrix, and one for the tokens of each device:
no scale depends on another device's tokens, so that none is waited for. Scales are dynamic: the largest magnitude
becomes the format's largest. Those of parameters are computed once per step, those of activations and gradients at each
product. Sums are in float32 (fp8) or int32 (int8), which is enough for 2^17 products: longer sums are added in parts.

    fp8    e4m3 for parameters and activations, e5m2 for gradients (Micikevicius et al. 2022, "FP8 Formats for Deep
           Learning"); scales are powers of two, so that they round nothing
    int8   127 levels on each side of zero

Values that are not finite make the scale, and so every result, infinite or NaN. Zeros stay zeros.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lmtrain.models.layers.four_bits import Blocks
from lmtrain.models.layers.remat import SAVED_PRODUCT
from lmtrain.sharding.local import num_parts, split_over

# The variable collection of 8-bit copies, next to `params`: `kernel` and `scale` of each layer. With `scale` alone, the
# layer's parameter itself is stored in 8 bits, and its products are not; in 4 bits, it has the arrays of `Blocks` in
# place of the parameter.
QUANTIZED = "quantized"
KERNEL, SCALE = "kernel", "scale"

# The number of products of two integers that are added in int32, over all devices. It could add 133,144 of 127 * 127;
# with a power of two, parts of a sum begin at multiples of a device's tiles.
MOST_ADDED = 2**17


class Format(NamedTuple):
    """Types of parameters and activations, and of gradients."""

    values: Any
    gradients: Any


FORMATS = {
    "fp8": Format(jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)),
    "int8": Format(jnp.dtype(jnp.int8), jnp.dtype(jnp.int8)),
}
EIGHT_BIT_TYPES = {kind for types in FORMATS.values() for kind in types}


class Quantized(NamedTuple):
    """8-bit `values`, which stand for values * scale; the float32 `scale` has their rank. Or what belongs to these two
    arrays, such as their shardings."""

    values: Any
    scale: Any

    def numbers(self, dtype: Any) -> jax.Array:
        """The numbers in `dtype`."""
        return times(self.values.astype(jnp.float32), self.scale, dtype)


def quantize(x: jax.Array, kind: Any, axes: tuple[int, ...]) -> Quantized:
    """`x` in the 8-bit type `kind`, with one scale for all positions along `axes`."""
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    is_integer = jnp.issubdtype(kind, jnp.integer)
    scale = largest / (127.0 if is_integer else float(jnp.finfo(kind).max))
    if not is_integer:
        mantissa, exponent = jnp.frexp(scale)
        power = jnp.ldexp(jnp.float32(1), jnp.where(mantissa == 0.5, exponent - 1, exponent))
        scale = jnp.where(jnp.isfinite(scale), power, scale)
    scale = jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)  # also of zeros: 1 / scale is finite
    if is_integer:
        return Quantized(jnp.round(x.astype(jnp.float32) * (1 / scale)).astype(kind), scale)
    x = x.astype(jnp.float32) if x.dtype == jnp.float16 else x  # whose range is smaller than that of 1 / scale
    return Quantized((x * (1 / scale).astype(x.dtype)).astype(kind), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x: jax.Array, kernel: jax.Array, quantized: Quantized, inputs: int) -> jax.Array:
    """x [..., *inputs] times a kernel [*inputs, *outputs] with `inputs` contracted dimensions -> [..., *outputs].

    Both operands of all three products, the output and both gradients, have 8 bits. `kernel` only receives the
    gradient: the product uses its copy `quantized`. The first dimension of x are sequences or tokens, the second, if
    there is one, positions.
    """
    return _forward(x, kernel, quantized, inputs)[0]


def _forward(x: jax.Array, kernel: jax.Array, quantized: Quantized, inputs: int) -> tuple[jax.Array, Any]:
    leading = x.ndim - inputs
    x8 = _by_device(x, leading, quantized.values.dtype)
    y = _dot(x8.values, quantized.values, _dims(x8, 2 * leading), tuple(range(inputs)), x.dtype)
    scale = _scale_of(x8, leading, y.ndim) * quantized.scale.reshape(())
    y = times(y, scale, x.dtype).reshape(*x.shape[:leading], *quantized.values.shape[inputs:])
    if jnp.issubdtype(x8.values.dtype, jnp.integer):
        y = checkpoint_name(y, SAVED_PRODUCT)
    return y, (x8, quantized, jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype))


def _backward(inputs: int, saved: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
    x8, quantized, like_x, like_kernel = saved
    values = quantized.values
    leading = d_y.ndim - (values.ndim - inputs)
    d8 = _by_device(d_y, leading, gradient_type(values.dtype))
    d_x = _dot(d8.values, values, _dims(d8, 2 * leading), tuple(range(inputs, values.ndim)), like_x.dtype)
    d_x = times(d_x, _scale_of(d8, leading, d_x.ndim) * quantized.scale.reshape(()), like_x.dtype)
    d_x = d_x.reshape(*d_y.shape[:leading], *values.shape[:inputs])
    if like_kernel.dtype in EIGHT_BIT_TYPES:  # a frozen parameter
        return d_x, None, None
    # a product for each device's tokens, since each has its scale; their sum is the collective of the gradient
    rows, parts = tuple(range(1, 2 * leading, 2)), tuple(range(0, 2 * leading, 2))
    d_kernel = contract(x8.values, d8.values, ((rows, rows), (parts, parts)), like_kernel.dtype)
    scale = (x8.scale.reshape(-1) * d8.scale.reshape(-1)).reshape(*d_kernel.shape[:leading], *(1,) * values.ndim)
    d_kernel = times(d_kernel, scale, like_kernel.dtype)
    zero = jnp.zeros((), d_kernel.dtype)
    return d_x, jax.lax.reduce(d_kernel, zero, jax.lax.add, tuple(range(leading))), None


product.defvjp(_forward, _backward)


def gradient_type(kind: Any) -> Any:
    """The type of gradients that belongs to one of values."""
    return next(types.gradients for types in FORMATS.values() if types.values == kind)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def stored_product(x: jax.Array, kernel: Quantized | Blocks, inputs: int) -> jax.Array:
    """x [..., *inputs] times a frozen kernel that is stored in 8 or 4 bits, in the type of x -> [..., *outputs]. Its
    numbers are computed again for the gradient: kept, they would take more memory than storage saves."""
    dims = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return jax.lax.dot_general(x, kernel.numbers(x.dtype), (dims, ((), ())))


def _stored_backward(inputs: int, kernel: Quantized | Blocks, d_y: jax.Array) -> tuple[jax.Array, None]:
    matrix = kernel.numbers(d_y.dtype)
    outputs = matrix.ndim - inputs
    dims = tuple(range(d_y.ndim - outputs, d_y.ndim)), tuple(range(inputs, matrix.ndim))
    return jax.lax.dot_general(d_y, matrix, (dims, ((), ()))), None


stored_product.defvjp(lambda x, kernel, inputs: (stored_product(x, kernel, inputs), kernel), _stored_backward)


def _by_device(x: jax.Array, leading: int, kind: Any) -> Quantized:
    """`x` in 8 bits, with a scale for each device's part; every leading dimension [n] is split in two, [parts, n /
    parts]."""
    shape: list[int] = []
    for size, axis in zip(x.shape[:leading], ("act_batch", "act_seq"), strict=False):
        parts = num_parts(split_over(axis))
        shape += [parts, size // parts] if size % parts == 0 else [1, size]
    return quantize(
        x.reshape(*shape, *x.shape[leading:]),
        kind,
        (*range(1, len(shape), 2), *range(len(shape), len(shape) + x.ndim - leading)),
    )


def _dims(quantized: Quantized, first: int) -> tuple[int, ...]:
    return tuple(range(first, quantized.values.ndim))


def _scale_of(quantized: Quantized, leading: int, rank: int) -> jax.Array:
    """The scales of devices' parts for results of this rank, with the same leading dimensions."""
    shape = quantized.scale.shape[: 2 * leading]
    return quantized.scale.reshape(*shape, *(1,) * (rank - len(shape)))


def contract(x: jax.Array, y: jax.Array, dims: Any, dtype: Any) -> jax.Array:
    """`dot_general` of 8-bit arrays with these dimension numbers, in `dtype`, or for integers int32; in float32 if the
    sums are longer than int32 can add."""
    (of_x, of_y), _ = dims
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jax.lax.dot_general(x, y, dims, preferred_element_type=dtype)
    total = None
    for part in _parts([x.shape[dim] for dim in of_x]):
        own_x, own_y = x, y
        for dim_x, dim_y, (begin, end) in zip(of_x, of_y, part, strict=True):
            own_x = jax.lax.slice_in_dim(own_x, begin, end, axis=dim_x)
            own_y = jax.lax.slice_in_dim(own_y, begin, end, axis=dim_y)
        added = jax.lax.dot_general(own_x, own_y, dims, preferred_element_type=jnp.int32)
        total = added if total is None else total.astype(jnp.float32) + added.astype(jnp.float32)
    assert total is not None
    return total


def _parts(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Ranges along dimensions of these sizes, of at most `MOST_ADDED` numbers each."""
    steps, room = [], MOST_ADDED
    for size in reversed(sizes):
        steps.append(max(1, min(size, room)))
        room //= steps[-1]
    return itertools.product(
        *(
            [(begin, min(begin + step, size)) for begin in range(0, max(size, 1), step)]
            for size, step in zip(sizes, reversed(steps), strict=True)
        )
    )


def _dot(x: jax.Array, kernel: jax.Array, of_x: tuple[int, ...], of_kernel: tuple[int, ...], dtype: Any) -> jax.Array:
    return contract(x, kernel, ((of_x, of_kernel), ((), ())), dtype)


def times(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x * scale in `dtype`: in float32 for integers, else in the type of x, which a power of two does not round."""
    kind = jnp.float32 if jnp.issubdtype(x.dtype, jnp.integer) else x.dtype
    return (x.astype(kind) * scale.astype(kind)).astype(dtype)
