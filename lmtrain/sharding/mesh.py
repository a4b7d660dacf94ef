"""The device mesh (replica, data, expert, context, model), the two mappings from logical axes to it, and functions
on it.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmtrain.runtime.errors import UserError, counted, nearest_divisors
from lmtrain.sharding.axes import MESH_AXES, as_names
from lmtrain.sharding.config import Mapping, PartitioningConfig

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The mesh, and the sharding rules of parameters (with optimizer state) and of computation.

    `slice_ids` has, for each device in mesh order, the index of the slice or host whose fast network it is on.
    """

    mesh: Mesh
    parameter_rules: Rules
    compute_rules: Rules
    slice_ids: tuple[int, ...] = ()

    @property
    def num_batch_shards(self) -> int:
        """Number of shards of the batch."""
        return self.num_parts("act_batch")

    def num_parts(self, axis: str) -> int:
        """Number of shards of activations along the logical `axis`."""
        return math.prod(self.mesh.shape[name] for name in self._mesh_axes(axis))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context that sets the mesh and both mappings, which `constrain` and `split_over` use."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules([*self.compute_rules, *self.parameter_rules]):
            yield

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of [batch, sequence] arrays."""
        return NamedSharding(self.mesh, PartitionSpec(self._mesh_axes("act_batch"), self._mesh_axes("act_seq")))

    @property
    def rows(self) -> NamedSharding:
        """The sharding of [batch, ...] arrays whose other dimensions may have any size."""
        return NamedSharding(self.mesh, PartitionSpec(self._mesh_axes("act_batch")))

    def _mesh_axes(self, axis: str) -> tuple[str, ...]:
        return as_names(dict(self.compute_rules)[axis])


def build_layout(
    config: PartitioningConfig,
    devices: Sequence[Any] | None = None,
    slice_ids: Sequence[int] | None = None,
    replicas: int | None = None,
    expert_parts: int | None = None,
) -> Layout:
    """The layout over all `devices` of the run, by default JAX's.

    `slice_ids`: slice or host of each device, by default those of `slices_of`. `replicas` over slices: by default the
    configured number, for auto one. `expert_parts`, devices that split experts: the same. The outer axes of the mesh
    extend over slices, as far as necessary: neighbours along the inner ones are in one slice. Raises `UserError` if the
    number of devices is not divisible by the configured sizes, or if TPUs of several slices would share a product.
    """
    devices = find_devices() if devices is None else devices
    ids = dict(zip(devices, slice_ids or slices_of(devices), strict=True))
    slices = [[device for device in devices if ids[device] == number] for number in sorted(set(ids.values()))]
    replicas = replicas or configured_replicas(config, len(slices)) or 1
    expert_parts = expert_parts or configured_expert_parts(config) or 1
    shape = _shape(config, len(devices), len(slices), replicas, expert_parts)
    outer = _over_slices(shape, len(slices), platform_of(devices[0]) == "tpu")
    inner = tuple(size // parts for size, parts in zip(shape, outer, strict=True))
    # neighbours in the grid of a slice are also physical neighbours
    grids = [mesh_utils.create_device_mesh(inner, part, allow_split_physical_axes=True) for part in slices]
    # [outer sizes, inner sizes] -> each axis from its outer and its inner part
    order = [axis for number in range(len(shape)) for axis in (number, number + len(shape))]
    grid = np.stack(grids).reshape(*outer, *inner).transpose(order).reshape(shape)
    # Explicit axis types, the default of recent JAX, reject ordinary contractions over a sharded dimension.
    mesh = Mesh(grid, tuple(MESH_AXES), axis_types=(AxisType.Auto,) * len(MESH_AXES))
    in_mesh_order = tuple(ids[device] for device in grid.flat)
    unused = {"expert"} if expert_parts == 1 else set[str]()
    parameters, compute = (_rules(mapping, unused) for mapping in (config.parameter_mapping, config.compute_mapping))
    return Layout(mesh=mesh, parameter_rules=parameters, compute_rules=compute, slice_ids=in_mesh_order)


def configured_replicas(config: PartitioningConfig, slices: int) -> int | None:
    """The configured number of replicas over slices; None for auto."""
    given = config.replica_dcn_axis_size
    return None if given == "auto" else slices if given == -1 else given


def configured_expert_parts(config: PartitioningConfig) -> int | None:
    """The configured number of devices that split experts; None for auto."""
    return None if config.expert_axis_size == "auto" else config.expert_axis_size


def find_devices() -> list[Any]:
    """All devices of the run. Raises `UserError` if JAX has no device of the platform in JAX_PLATFORMS."""
    try:
        return list(jax.devices())
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS", "")
        reason = (str(error) or "its libraries are not installed, or it has no device").splitlines()[0]
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX cannot use this platform: {reason}; unset JAX_PLATFORMS to use the "
            "available devices. `lmtrain doctor` lists the devices of this machine, and which extra to install"
        ) from None


def platform_of(device: Any) -> str:
    """Platform of a device, of this machine or of a topology: `cpu`, `gpu` or `tpu`."""
    platform: str = device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def slice_id(device: Any) -> int:
    """Index of the slice or GPU host of a device; devices with the same index are on the same fast network.

    TPUs of a single slice have no `slice_index`. Other devices without one are grouped by process.
    """
    index: int | None = getattr(device, "slice_index", None)
    if index is not None:
        return index
    process: int = device.process_index
    return 0 if platform_of(device) == "tpu" else process


def slices_of(devices: Sequence[Any]) -> list[int]:
    """The index of the slice or host of each device, see `slice_id`; one for all if slices have different sizes."""
    ids = [slice_id(device) for device in devices]
    return ids if len({ids.count(number) for number in ids}) == 1 else [0] * len(ids)


def _shape(config: PartitioningConfig, devices: int, slices: int, replicas: int, expert_parts: int) -> tuple[int, ...]:
    """The sizes of the mesh's axes."""
    if replicas > 1 and slices > 1 and slices % replicas:
        near = " or ".join(map(str, nearest_divisors(slices, replicas)))
        raise UserError(
            f"trainer.replica_dcn_axis_size: {slices} slices do not divide into {replicas} replicas; it could be {near}"
        )
    if devices % replicas:
        raise UserError(f"trainer.replica_dcn_axis_size: {_do_not_divide(devices)} into {replicas} replicas")
    rest = devices // replicas
    sizes = {name: getattr(config, name) for name in ("model_axis_size", "context_axis_size", "replica_ici_axis_size")}
    for name, size in (sizes | {"expert_axis_size": expert_parts}).items():
        if rest % size:
            left = "" if rest == devices else f", {rest} left after the other axes,"
            near = " or ".join(map(str, nearest_divisors(rest, size)))
            raise UserError(f"trainer.{name}: {_do_not_divide(devices, left)} by {size}; it could be {near}")
        rest //= size
    return (
        replicas * config.replica_ici_axis_size,
        rest,
        expert_parts,
        config.context_axis_size,
        config.model_axis_size,
    )


def _over_slices(shape: tuple[int, ...], slices: int, is_tpu: bool) -> tuple[int, ...]:
    """How many parts of each axis of the mesh are in different slices: outer axes first."""
    outer, left = [], slices
    for size in shape:
        outer.append(math.gcd(size, left))
        left //= outer[-1]
    if is_tpu and outer[-1] > 1:
        raise UserError(
            f"trainer.model_axis_size: {shape[-1]} devices that share each product are more than one of {slices} "
            "slices has, and the network between slices is too slow for it; use a smaller size"
        )
    return tuple(outer)


def _do_not_divide(devices: int, left: str = "") -> str:
    return f"{counted(devices, 'device')}{left} {'does' if devices == 1 else 'do'} not divide"


def _rules(mapping: Mapping, unused: set[str]) -> Rules:
    used = {axis: tuple(name for name in mesh_axes if name not in unused) for axis, mesh_axes in mapping.items()}
    return tuple((axis, mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None) for axis, mesh_axes in used.items())


@dataclass(frozen=True)
class MeshFunction:
    """A jitted function, called and lowered with the mesh and the compute mapping of `layout`."""

    layout: Layout
    jitted: Any

    def __call__(self, *arguments: Any) -> Any:
        with self.layout.active():
            return self.jitted(*arguments)

    def lower(self, *arguments: Any) -> Any:
        with self.layout.active():
            return self.jitted.lower(*arguments)
