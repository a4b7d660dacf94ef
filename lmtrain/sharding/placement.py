"""Turning logical names into shardings, and numpy rows into global arrays."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.config.errors import UserError
from lmtrain.sharding.axes import ACTIVATION_AXES, check_axes
from lmtrain.sharding.mesh import Layout


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay the activation `x` out as the compute mapping says; one word per dimension."""
    check_axes(axes, ACTIVATION_AXES)
    return nn.with_logical_constraint(x, axes)


def parameter_shardings(layout: Layout, boxed: Any) -> Any:
    """The shardings of a tree of (abstract) parameters that carry logical names.

    Raises `UserError` naming the parameter if one of its sizes does not divide by the mesh axis it is split over, or
    if two of its dimensions would be split over the same one.
    """
    specs = nn.get_partition_spec(boxed)
    rules = dict(layout.parameter_rules)
    jax.tree_util.tree_map_with_path(lambda path, spec: _check_once(path, spec, rules), specs)
    shardings = nn.logical_to_mesh_sharding(specs, layout.mesh, list(layout.parameter_rules))
    shapes = nn.meta.unbox(boxed)
    jax.tree_util.tree_map_with_path(_check_divides, shapes, shardings)
    return shardings


def _check_once(path: Any, spec: PartitionSpec, rules: Mapping[str, Any]) -> None:
    """Flax would split the first dimension and leave the second whole, without a word."""
    split: dict[Any, str] = {}
    for axis in spec:
        mesh_axis = rules.get(axis)
        if mesh_axis is not None and mesh_axis in split:
            raise UserError(
                f"{jax.tree_util.keystr(path)}: {split[mesh_axis]!r} and {axis!r} cannot both be split over the "
                f"{mesh_axis} devices; take one out of trainer.fsdp_axis or trainer.tensor_parallel_axes"
            )
        split[mesh_axis] = axis


def _check_divides(path: Any, shape: Any, sharding: NamedSharding) -> None:
    for size, axes in zip(shape.shape, sharding.spec, strict=False):
        names = (axes,) if isinstance(axes, str) else axes or ()
        parts = int(np.prod([sharding.mesh.shape[name] for name in names]))
        if size % parts:
            raise UserError(
                f"{jax.tree_util.keystr(path)}: a dimension of {size} cannot be split over {parts} devices "
                f"(mesh axis {'+'.join(names)}); change that size, the number of devices, or trainer.fsdp_axis "
                "and trainer.tensor_parallel_axes"
            )


def like_parameters(layout: Layout, state: Any, params: Any, shardings: Any) -> Any:
    """Shardings for a tree that holds copies of the parameters' tree (an optimizer state) and scalars.

    Subtrees with the structure of `params` get its shardings; everything else is replicated.
    """
    structure: Any = jax.tree.structure(params)

    def is_copy(node: Any) -> bool:
        return bool(structure == jax.tree.structure(node))

    return jax.tree.map(lambda node: shardings if is_copy(node) else layout.replicated, state, is_leaf=is_copy)


def local_rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """The rows of a global [batch_size, ...] array that this process's devices hold, ascending."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map((batch_size,)).values():
        assert index is not None
        rows.update(range(*index[0].indices(batch_size)))
    return np.array(sorted(rows), dtype=np.int64)


def place_batch(batch: Mapping[str, np.ndarray], sharding: NamedSharding, rows: np.ndarray, batch_size: int) -> Any:
    """Global arrays [batch_size, ...] out of this process's `rows` of them."""

    def place(local: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(batch_size)
            begin = int(np.searchsorted(rows, first))
            return local[begin : begin + last - first]

        return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)

    return {name: place(local) for name, local in batch.items()}
