"""Manual sharding: code that each device runs on its shard, where the compiler's partitioning is slower."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.sharding.axes import as_names
from lmtrain.sharding.mesh import platform_of


def split_over(axis: str) -> tuple[str, ...]:
    """The mesh axes that the logical `axis` is split over in the program being traced; empty outside a mesh.

    Names that start with `act_` are axes of activations, all others are axes of parameters at rest.
    """
    mesh = jax.sharding.get_abstract_mesh()
    names = as_names(dict(nn.get_logical_axis_rules()).get(axis))
    return tuple(name for name in names if mesh.shape.get(name, 1) > 1)


def num_parts(names: tuple[str, ...]) -> int:
    """Number of shards along these mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in names)


def dividing(axis: str, size: int) -> tuple[str, ...]:
    """The mesh axes that split a dimension of this size along the logical `axis`; none if they do not divide it."""
    names = split_over(axis)
    return names if size % num_parts(names) == 0 else ()


def per_device(function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """`function` applied to each device's shard of its arguments; unchanged with one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def platform() -> str:
    """Platform that the program is compiled for: `cpu`, `gpu` or `tpu`. It may differ from this machine's.

    It decides whether kernels are interpreted, and chunk sizes.
    """
    return platform_of(_device())


def is_cpu_alone() -> bool:
    """Whether the program is compiled for one device, a CPU."""
    return platform() == "cpu" and jax.sharding.get_abstract_mesh().size == 1


def flat(x: jax.Array, kept: int = 1) -> jax.Array:
    """`x` with its dimensions before the last `kept` as one, where this is faster and needs no communication.

    XLA's reductions on CPUs are up to ten times slower if the first dimension is 1, as with one sequence at a time. On
    GPUs it computes a norm of [rows, D] in one kernel, but chooses slow layouts for [B, S, D].
    """
    is_stream = x.ndim - kept == 2 and not split_over("act_stream")
    if not (is_cpu_alone() or (platform() == "gpu" and is_stream)):
        return x
    return x.reshape(-1, *x.shape[x.ndim - kept :])


def device_kind() -> str:
    """JAX's name of the devices that the program is compiled for; empty if unknown."""
    kind: str = _device().device_kind
    return kind


def _device() -> Any:
    mesh = jax.sharding.get_abstract_mesh()
    return jax.devices()[0] if mesh.empty else mesh.abstract_device


def spread(x: jax.Array) -> jax.Array:
    """`x` with only its first dimension split, over all devices of a model replica."""
    mesh = jax.sharding.get_abstract_mesh()
    names = tuple(name for name in mesh.axis_names if name != "replica" and mesh.shape[name] > 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(names)) if names else x


def sum_over(names: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Sum over the devices along these mesh axes (all-reduce); `x` itself if there are none."""
    return jax.lax.psum(x, names) if names else x


def scatter_sum(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """Reduce-scatter: the sum over the devices along these mesh axes, of which each keeps its part along `dim`.

    The barrier keeps XLA:TPU from moving the collective out of the loop over microbatches, where it fails.
    """
    if not names:
        return x
    for groups in _stages(names):
        x = jax.lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True, axis_index_groups=groups)
    return jax.lax.optimization_barrier(x)


# XLA:TPU compiles one reduce-scatter over many devices to an all-reduce, which sends twice the bytes, but not one over
# a part of them. The last stage, with the least data, is over this many neighbours: a row of a v4 or v5p.
_LAST_STAGE = 4
_MIN_IN_STAGES = 16


def _stages(names: tuple[str, ...]) -> list[list[list[int]] | None]:
    """The groups of devices of each stage of a reduce-scatter; None: all in one."""
    parts = num_parts(names)
    if platform() != "tpu" or parts < _MIN_IN_STAGES or parts % _LAST_STAGE:
        return [None]
    numbers = range(0, parts, _LAST_STAGE)
    across = [[first + last for first in numbers] for last in range(_LAST_STAGE)]
    neighbours = [[first + last for last in range(_LAST_STAGE)] for first in numbers]
    return [across, neighbours]


def gather(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    """The parts of all devices along these mesh axes, joined along `dim` (all-gather); gradients are scattered."""
    if not names:
        return x
    is_differentiable = jnp.issubdtype(x.dtype, jnp.inexact)
    return _gather(x, names, dim) if is_differentiable else jax.lax.all_gather(x, names, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, names: tuple[str, ...], dim: int) -> jax.Array:
    return jax.lax.all_gather(x, names, axis=dim, tiled=True)


_gather.defvjp(
    lambda x, names, dim: (_gather(x, names, dim), None), lambda names, dim, _, d_x: (scatter_sum(d_x, names, dim),)
)
