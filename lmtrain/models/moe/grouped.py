"""Grouped products: each row is multiplied with the matrix of its expert. One record per kernel, chosen by platform.

R rows, sorted by expert  E experts  I inputs  O outputs
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.attention.kernel import Choice
from lmtrain.models.layers.quantized import Quantized, quantize, times
from lmtrain.sharding.local import device_kind, platform


@dataclass(frozen=True, kw_only=True)
class GroupedKernel:
    """A kernel of grouped products.

    `by_rows(x [R, I], kernel [E, I, O], sizes int32 [E], transposed, dtype)` -> [R, O] multiplies the rows of each
    expert, in their order, with its matrix, or x [R, O] with the transposed matrix -> [R, I].
    `d_kernel(x [R, I], d_y [R, O], sizes, dtype)` -> [E, I, O] is each expert's x^T d_y. Results of rows after the last
    expert's are 0, whatever these rows contain; so are the matrices of experts without rows.

    `rows_computed(rows, experts)` is the mean number of rows that a product computes with balanced random routing: more
    than `rows`, since a tile has one expert. `mean_trips(rows, experts)` is the mean number of tiles of an expert, if
    its products are in the text of a compiled program, in loops over tiles; None for kernels, whose FLOPs are counted
    by formula. `unavailable` returns why the kernel cannot run on a kind of device, or with the installed JAX; empty
    if it can. `formats`: 8-bit formats of its operands (`lmtrain/models/layers/quantized.py`).
    """

    name: str
    by_rows: Callable[..., jax.Array]
    d_kernel: Callable[..., jax.Array]
    rows_computed: Callable[[int, int], float]
    mean_trips: Callable[[int, int], float] | None = None
    unavailable: Callable[[str], str] = lambda device_kind: ""
    formats: frozenset[str] = frozenset()


# By platform: modules of this folder with a record `KERNEL`, the fastest first. The last runs everywhere.
_KERNELS = {"tpu": ("megablox", "tiled"), "gpu": ("triton", "tokamax", "tiled"), "cpu": ("tiled",)}

# Part of the name of all grouped products in a compiled program.
SCOPE = "grouped_product"


def of_experts(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """`x` with zeros in the rows after the last expert's."""
    return jnp.where((jnp.arange(len(x)) < sizes.sum())[:, None], x, jnp.zeros((), x.dtype))


def kernel_of(name: str) -> GroupedKernel:
    """The kernel of a name."""
    kernel: GroupedKernel = importlib.import_module(f"lmtrain.models.moe.{name}").KERNEL
    return kernel


def choose_grouped(platform: str, device_kind: str) -> Choice:
    """The kernel for a platform, cpu, gpu or tpu, and a kind of device, by JAX's name of it."""
    reasons: list[str] = []
    for kernel in map(kernel_of, _KERNELS[platform]):
        if not (reason := kernel.unavailable(device_kind)):
            return Choice(kernel.name, "; ".join(reasons) or "fastest on this device")
        reasons.append(f"{kernel.name} {reason}")
    raise AssertionError(reasons)


def supports(products: str) -> bool:
    """Whether the kernel of the program being traced has products in this 8-bit format."""
    return products in kernel_of(choose_grouped(platform(), device_kind()).name).formats


def grouped(
    x_RI: jax.Array, kernel_EIO: jax.Array, sizes_E: jax.Array, quantized: Quantized | None = None
) -> jax.Array:
    """The product of each row with the matrix of its expert, [R, O]; see `GroupedKernel`. With the 8-bit copy of the
    kernel, in 8 bits: `kernel_EIO` only receives the gradient then."""
    name = choose_grouped(platform(), device_kind()).name
    with jax.named_scope(SCOPE):
        if quantized is None:
            return product(name, x_RI, kernel_EIO, sizes_E)
        return product_8_bit(name, x_RI, kernel_EIO, sizes_E, quantized)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(name: str, x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> jax.Array:
    """`grouped` by the kernel of a name."""
    return kernel_of(name).by_rows(x, kernel, sizes, False, x.dtype)


def _backward(name: str, saved: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, kernel, sizes = saved
    use = kernel_of(name)
    return use.by_rows(d_y, kernel, sizes, True, d_y.dtype), use.d_kernel(x, d_y, sizes, kernel.dtype), None


product.defvjp(lambda name, x, kernel, sizes: (product(name, x, kernel, sizes), (x, kernel, sizes)), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_8_bit(name: str, x: jax.Array, kernel: jax.Array, sizes: jax.Array, quantized: Quantized) -> jax.Array:
    """`grouped` in 8 bits by the kernel of a name, with one scale for all rows. These have to be finite, also those
    after the last expert's. Gradients have the type of the values, also with fp8: kernels take operands of one type."""
    return _forward_8_bit(name, x, kernel, sizes, quantized)[0]


def _forward_8_bit(
    name: str, x: jax.Array, kernel: jax.Array, sizes: jax.Array, quantized: Quantized
) -> tuple[jax.Array, Any]:
    x8 = quantize(x, quantized.values.dtype, (0, 1))
    y = kernel_of(name).by_rows(x8.values, quantized.values, sizes, False, x.dtype)
    y = times(y, (x8.scale * quantized.scale).reshape(()), x.dtype)
    return y, (x8, sizes, quantized, jnp.zeros(0, kernel.dtype))


def _backward_8_bit(name: str, saved: Any, d_y: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    x8, sizes, quantized, like_kernel = saved
    use, d8 = kernel_of(name), quantize(d_y, x8.values.dtype, (0, 1))
    d_x = use.by_rows(d8.values, quantized.values, sizes, True, d_y.dtype)
    d_kernel = use.d_kernel(x8.values, d8.values, sizes, like_kernel.dtype)
    return (
        times(d_x, (d8.scale * quantized.scale).reshape(()), d_y.dtype),
        times(d_kernel, (x8.scale * d8.scale).reshape(()), like_kernel.dtype),
        None,
        None,
    )


product_8_bit.defvjp(_forward_8_bit, _backward_8_bit)
