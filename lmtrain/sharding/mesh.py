"""The device mesh (replica, data, model) and the two mappings from logical axes to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lmtrain.config.errors import UserError
from lmtrain.sharding.axes import ACTIVATION_AXES, ACTIVATION_OF, MESH_AXES, PARAMETER_AXES
from lmtrain.sharding.config import PartitioningConfig, names

BATCH_MESH_AXES = ("replica", "data")

Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@dataclass(frozen=True)
class Layout:
    """Where things live: the mesh, how parameters and optimizer state lie at rest, how computation runs."""

    mesh: Mesh
    parameter_rules: Rules
    compute_rules: Rules

    @property
    def num_batch_shards(self) -> int:
        """Into how many parts the batch is split."""
        return int(np.prod([self.mesh.shape[axis] for axis in BATCH_MESH_AXES]))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, compiled functions see the mesh, and models' `constrain` the compute mapping."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(list(self.compute_rules)):
            yield

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """The sharding of [batch, sequence] arrays."""
        return NamedSharding(self.mesh, PartitionSpec(BATCH_MESH_AXES))


def plan_layout(config: PartitioningConfig) -> Layout:
    """The layout over all devices of the run. Raises `UserError` if the devices do not divide."""
    model_axis_size = config.model_axis_size
    devices = jax.devices()
    if len(devices) % model_axis_size:
        fits = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
        raise UserError(
            f"trainer.model_axis_size: {len(devices)} devices do not divide by {model_axis_size}; "
            f"it could be {', '.join(map(str, fits))}"
        )
    shape = (1, len(devices) // model_axis_size, model_axis_size)
    # Explicit axis types, recent JAX's default, reject ordinary contractions over a sharded dimension.
    mesh = jax.make_mesh(shape, tuple(MESH_AXES), axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)

    fsdp, tensor = names(config.fsdp_axis), names(config.tensor_parallel_axes)

    parameters: dict[str, str | tuple[str, ...] | None] = dict.fromkeys(PARAMETER_AXES)
    compute: dict[str, str | tuple[str, ...] | None] = dict.fromkeys(ACTIVATION_AXES)
    for axis in tensor:
        parameters[axis] = "model"
        if axis in ACTIVATION_OF:
            compute[ACTIVATION_OF[axis]] = "model"
    for axis in fsdp:
        parameters[axis] = "data"
    compute["act_batch"] = BATCH_MESH_AXES
    return Layout(mesh, tuple(parameters.items()), tuple(compute.items()))
