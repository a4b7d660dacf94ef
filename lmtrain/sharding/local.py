"""Code that each device runs on its own part of the arrays, where the compiler's own partitioning would do worse."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import PartitionSpec

from lmtrain.sharding.axes import as_names


def split_over(axis: str) -> tuple[str, ...]:
    """The mesh axes that the logical `axis` is split over in the program being traced; none outside a mesh.

    Activations have the words that begin with `act_`; the other words are those of parameters at rest.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = as_names(dict(nn.get_logical_axis_rules()).get(axis))
    return tuple(name for name in names if mesh.shape.get(name, 1) > 1)


def num_parts(names: tuple[str, ...]) -> int:
    """How many parts these mesh axes make."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in names)


def per_device(function: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], out_specs: Any) -> Callable[..., Any]:
    """`function` on each device's part of its arguments; as it is where there is one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: that of the devices the program is compiled for, which may be others than this machine's.

    Interpreted kernels and sizes of chunks depend on it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    name: str = jax.default_backend() if mesh.empty else mesh.abstract_device.platform
    return "gpu" if name in ("cuda", "rocm") else name


def device_kind() -> str:
    """The name of the devices the program is compiled for, as JAX gives it; empty if it is not known."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.devices()[0].device_kind if mesh.empty else mesh.abstract_device.device_kind


def spread(x: jax.Array) -> jax.Array:
    """`x` with its first dimension split over the devices of a copy of the model, and the others whole."""
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(name for name in ("data", "model") if mesh.shape.get(name, 1) > 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(names)) if names else x


def sum_over(names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The sum over the devices along these mesh axes; `x` itself if there are none."""
    return jax.lax.psum(x, names) if names else x


def scatter_sum(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Of the sum over the devices along these mesh axes, each one's part along `dim`.

    The barrier keeps XLA:TPU from moving the collective out of a loop of microbatches, where it fails.
    """
    if not names:
        return x
    return jax.lax.optimization_barrier(jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True))
