"""The device mesh (replica, data, model) and the two mappings from logical axes to it."""

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

from lmtrain.config.counts import counted
from lmtrain.config.errors import UserError
from lmtrain.config.suggest import nearest_divisors
from lmtrain.sharding.axes import MESH_AXES, as_names
from lmtrain.sharding.config import Mapping, PartitioningConfig

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@dataclass(frozen=True)
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
        return NamedSharding(self.mesh, PartitionSpec(self._mesh_axes("act_batch")))

    def _mesh_axes(self, axis: str) -> tuple[str, ...]:
        return as_names(dict(self.compute_rules)[axis])


def build_layout(
    config: PartitioningConfig, devices: Sequence[Any] | None = None, slice_ids: Sequence[int] | None = None
) -> Layout:
    """The layout over all `devices` of the run. `slice_ids`: slice or host of each device, by default JAX's.

    Raises `UserError` if the number of devices is not divisible by the configured sizes.
    """
    devices = find_devices() if devices is None else devices
    ids = dict(zip(devices, slice_ids or [slice_id(device) for device in devices], strict=True))
    slices = len(set(ids.values()))
    across = slices if config.replica_dcn_axis_size == -1 else config.replica_dcn_axis_size
    _check_sizes(config, len(devices), slices, across)
    data = len(devices) // (across * config.replica_ici_axis_size * config.model_axis_size)
    shape = (config.replica_ici_axis_size, data, config.model_axis_size)
    by_slice = sorted(devices, key=lambda device: ids[device])
    size = len(devices) // across
    groups = [by_slice[first : first + size] for first in range(0, len(devices), size)]
    # neighbours in the grid of a group are also physical neighbours
    grids = [mesh_utils.create_device_mesh(shape, group, allow_split_physical_axes=True) for group in groups]
    grid = np.concatenate(grids, axis=0)
    # Explicit axis types, the default of recent JAX, reject ordinary contractions over a sharded dimension.
    mesh = Mesh(grid, tuple(MESH_AXES), axis_types=(AxisType.Auto,) * len(MESH_AXES))
    in_mesh_order = tuple(ids[device] for device in grid.flat)
    return Layout(mesh, _rules(config.parameter_mapping), _rules(config.compute_mapping), in_mesh_order)


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


def _check_sizes(config: PartitioningConfig, devices: int, slices: int, across: int) -> None:
    if across > 1 and slices > 1 and slices % across:
        near = " or ".join(map(str, nearest_divisors(slices, across)))
        raise UserError(
            f"trainer.replica_dcn_axis_size: {slices} slices do not divide into {across} replicas; it could be {near}"
        )
    if devices % across:
        raise UserError(f"trainer.replica_dcn_axis_size: {_do_not_divide(devices)} into {across} replicas")
    for name, size, rest in (
        ("model_axis_size", config.model_axis_size, devices // across),
        ("replica_ici_axis_size", config.replica_ici_axis_size, devices // across // config.model_axis_size),
    ):
        if rest % size:
            left = "" if rest == devices else f", {rest} left after the other axes,"
            near = " or ".join(map(str, nearest_divisors(rest, size)))
            raise UserError(f"trainer.{name}: {_do_not_divide(devices, left)} by {size}; it could be {near}")


def _do_not_divide(devices: int, left: str = "") -> str:
    return f"{counted(devices, 'device')}{left} {'does' if devices == 1 else 'do'} not divide"


def _rules(mapping: Mapping) -> Rules:
    return tuple(
        (axis, mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None) for axis, mesh_axes in mapping.items()
    )
