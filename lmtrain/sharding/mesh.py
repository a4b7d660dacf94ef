"""The device mesh (replica, data, model) and the two mappings from logical axes to it."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmtrain.config.errors import UserError
from lmtrain.config.suggest import nearest_divisors
from lmtrain.sharding.axes import MESH_AXES, as_names
from lmtrain.sharding.config import Mapping as AxisMapping
from lmtrain.sharding.config import PartitioningConfig

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@dataclass(frozen=True)
class Layout:
    """The mesh, and the sharding rules of parameters (with optimizer state) and of computation.

    `islands` has, for each device in mesh order, the index of the slice or host whose fast network it is on.
    """

    mesh: Mesh
    parameter_rules: Rules
    compute_rules: Rules
    islands: tuple[int, ...] = ()

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


def plan_layout(
    config: PartitioningConfig, devices: Sequence[Any] | None = None, islands: Sequence[int] | None = None
) -> Layout:
    """The layout over all `devices` of the run. `islands`: slice or host of each device, by default JAX's.

    Raises `UserError` if the number of devices is not divisible by the configured sizes.
    """
    devices = find_devices() if devices is None else devices
    numbers = dict(zip(devices, islands or [island_of(device) for device in devices], strict=True))
    slices = _slices(devices, numbers)
    across = len(slices) if config.replica_dcn_axis_size == -1 else config.replica_dcn_axis_size
    _check_sizes(config, len(devices), len(slices), across)
    replicas = config.replica_ici_axis_size
    data = len(devices) // (across * replicas * config.model_axis_size)
    shape = (replicas, data, config.model_axis_size)
    grid = np.concatenate([_grid(shape, group) for group in _grouped(slices, across)], axis=0)
    # Explicit axis types, the default of recent JAX, reject ordinary contractions over a sharded dimension.
    mesh = Mesh(grid, tuple(MESH_AXES), axis_types=(AxisType.Auto,) * len(MESH_AXES))
    on = tuple(numbers[device] for device in grid.flat)
    return Layout(mesh, _rules(config.parameter_mapping), _rules(config.compute_mapping), on)


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


def island_of(device: Any) -> int:
    """Index of the slice or GPU host of a device; devices with the same index are on the same fast network.

    TPUs of a single slice have no `slice_index`. Other devices without one are grouped by process.
    """
    number = getattr(device, "slice_index", None)
    alone: int = 0 if platform_of(device) == "tpu" else device.process_index
    return alone if number is None else number


def _slices(devices: Sequence[Any], numbers: Mapping[Any, int]) -> list[list[Any]]:
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(numbers[device], []).append(device)
    return [groups[number] for number in sorted(groups)]


def _check_sizes(config: PartitioningConfig, devices: int, slices: int, across: int) -> None:
    if across > 1 and slices > 1 and slices % across:
        near = " or ".join(map(str, nearest_divisors(slices, across)))
        raise UserError(
            f"trainer.replica_dcn_axis_size: {slices} slices do not divide into {across} replicas; it could be {near}"
        )
    if devices % across:
        raise UserError(f"trainer.replica_dcn_axis_size: {devices} devices do not divide into {across} replicas")
    for name, size, rest in (
        ("model_axis_size", config.model_axis_size, devices // across),
        ("replica_ici_axis_size", config.replica_ici_axis_size, devices // across // config.model_axis_size),
    ):
        if rest % size:
            per = f"{devices} devices" if rest == devices else f"{devices} devices, {rest} left after the other axes,"
            near = " or ".join(map(str, nearest_divisors(rest, size)))
            raise UserError(f"trainer.{name}: {per} do not divide by {size}; it could be {near}")


def _grouped(slices: list[list[Any]], groups: int) -> list[list[Any]]:
    """The devices in `groups` equal groups, in the order of the slices."""
    devices = [device for group in slices for device in group]
    size = len(devices) // groups
    return [devices[i * size : (i + 1) * size] for i in range(groups)]


def _grid(shape: tuple[int, ...], devices: list[Any]) -> np.ndarray:
    """The devices in a grid in which neighbours are also physical neighbours."""
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _rules(mapping: AxisMapping) -> Rules:
    return tuple(
        (axis, mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None) for axis, mesh_axes in mapping.items()
    )
