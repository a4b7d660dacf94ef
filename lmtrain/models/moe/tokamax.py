"""Grouped products on NVIDIA's Hopper GPUs by tokamax, in 16 bits; others are `tiled`. They stand in for `triton` where
JAX no longer has that one's backend. Without a GPU they are plain operations, for tests.

    R rows, sorted by expert  E experts  I inputs  O outputs
"""

from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.attention.kernel import is_hopper, missing_tokamax
from lmtrain.models.moe import tiled
from lmtrain.models.moe.grouped import GroupedKernel, of_experts
from lmtrain.sharding.local import platform


def by_rows(x: jax.Array, kernel: jax.Array, sizes: jax.Array, transposed: bool, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    if not _is_16_bit(x, kernel):
        return tiled.by_rows(x, kernel, sizes, transposed, dtype)
    y = _product(x, kernel, sizes, (1, 2 if transposed else 1), [0], dtype)
    return of_experts(y, sizes)  # the kernel does not write rows after the last expert's


def d_kernel(x: jax.Array, d_y: jax.Array, sizes: jax.Array, dtype: Any) -> jax.Array:
    """See `GroupedKernel`."""
    if not _is_16_bit(x, d_y):
        return tiled.d_kernel(x, d_y, sizes, dtype)
    # the kernel multiplies rows of a tile that are another expert's with zero, which keeps NaN
    return _product(of_experts(x, sizes), of_experts(d_y, sizes), sizes, (0, 0), [], dtype)


def _is_16_bit(*arrays: jax.Array) -> bool:
    return all(array.dtype in (jnp.bfloat16, jnp.float16) for array in arrays) or platform() != "gpu"


def _product(
    x: jax.Array, y: jax.Array, sizes: jax.Array, contracted: tuple[int, int], experts: list[int], dtype: Any
) -> jax.Array:
    from tokamax import ragged_dot_general  # slow to import

    products = tuple((dim,) for dim in contracted)
    dimensions = jax.lax.RaggedDotDimensionNumbers((products, ((), ())), [0], experts)
    implementation = "mosaic" if platform() == "gpu" else "xla"
    result: jax.Array = ragged_dot_general(
        *(x, y, sizes, dimensions), preferred_element_type=dtype, implementation=implementation
    )
    return result


def _unavailable(device_kind: str) -> str:
    """It has no weight gradient on Blackwell GPUs."""
    if not is_hopper(device_kind):
        return f"requires a Hopper GPU (H100, H200, ...), got {device_kind}"
    return missing_tokamax()


KERNEL = GroupedKernel(
    name="tokamax",
    by_rows=by_rows,
    d_kernel=d_kernel,
    rows_computed=lambda rows, experts: rows + experts * 127 / 2,  # tiles have at most 128 rows
    unavailable=_unavailable,
)
