"""Conversion of logical axis names to shardings, and of numpy rows to global arrays."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.runtime.errors import UserError, nearest_divisors
from lmtrain.sharding.axes import ACTIVATION_AXES, as_names, check_axes
from lmtrain.sharding.local import dividing, num_parts, split_over
from lmtrain.sharding.mesh import Layout


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Shard the activation `x` by the compute mapping; `axes` has one logical name per dimension.

    Raises `UserError` if a size is not divisible by the devices it is split over, or if two dimensions are split over
    the same devices: the compiler would report the first as an internal error and silently ignore the second.
    """
    check_axes(axes, ACTIVATION_AXES)
    if "act_stream" in axes and not _stream_divides(x.shape[axes.index("act_stream")]):
        axes = tuple("act_seq" if axis == "act_stream" else axis for axis in axes)
    rules = dict(nn.get_logical_axis_rules())
    mesh = jax.sharding.get_abstract_mesh()
    if rules and not mesh.empty:
        # a batch of one at initialization, or a few tokens at generation, may leave devices idle
        any_size = ("act_batch", "act_seq", "act_stream")
        split = [
            (axis, 0 if axis in any_size else size, as_names(rules.get(axis or "")))
            for axis, size in zip(axes, x.shape, strict=True)
        ]
        _check_split("computation", split, mesh.shape, "trainer.compute_axis_resources or tensor_parallel_axes")
    return nn.with_logical_constraint(x, axes)


def gather_rows(table_VD: jax.Array) -> jax.Array:
    """Gather the rows of a vocabulary table, which may stay split along the vocabulary.

    Its sharding at rest is constrained first: otherwise the compiler would gather it before the cast to the compute
    dtype. Raises `UserError` if the vocabulary is not divisible by the devices it is split over.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        at_rest = PartitionSpec(split_over("vocab"), split_over("embed"))
        table_VD = jax.lax.with_sharding_constraint(table_VD, at_rest)
    return constrain(table_VD, "act_vocab", None)


def gather_stored(array: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Gather an array of a frozen parameter over the devices that split the batch, in the bits in which it is stored:
    the compiler would gather its numbers. `axes` are the logical names of its dimensions."""
    if jax.sharding.get_abstract_mesh().empty:
        return array
    of_batch = {*split_over("act_batch"), *split_over("act_seq")}
    split = [dividing(axis, size) if axis else () for axis, size in zip(axes, array.shape, strict=True)]
    spec = PartitionSpec(*(tuple(name for name in names if name not in of_batch) for names in split))
    return jax.lax.with_sharding_constraint(array, spec)


def stream_axes(length: int) -> tuple[str, ...]:
    """The mesh axes over which the residual stream is split along the sequence, for sequences of this length."""
    return next((names for names in map(split_over, ("act_stream", "act_seq")) if length % num_parts(names) == 0), ())


def _stream_divides(length: int) -> bool:
    return length % num_parts(split_over("act_stream")) == 0


def parameter_shardings(layout: Layout, boxed: Any) -> Any:
    """The shardings of a tree of (abstract) parameters with logical axis names.

    Raises `UserError` with the parameter's name if one of its sizes is not divisible by the mesh axis it is split over,
    or if two of its dimensions are split over the same mesh axis.
    """
    specs = nn.get_partition_spec(boxed)
    rules = dict(layout.parameter_rules)

    def check(path: Any, shape: Any, spec: PartitionSpec) -> None:
        named = [*spec, *[None] * (len(shape.shape) - len(spec))]
        split = [(axis, size, as_names(rules.get(axis))) for axis, size in zip(named, shape.shape, strict=True)]
        settings = "trainer.fsdp_axis, tensor_parallel_axes or parameter_axis_resources"
        _check_split(jax.tree_util.keystr(path, simple=True, separator="/"), split, layout.mesh.shape, settings)

    jax.tree_util.tree_map_with_path(check, nn.meta.unbox(boxed), specs)
    return nn.logical_to_mesh_sharding(specs, layout.mesh, list(layout.parameter_rules))


def _check_split(
    what: str, split: Sequence[tuple[str | None, int, tuple[str, ...]]], sizes: Mapping[str, int], settings: str
) -> None:
    """Check one array. `split` has the logical axis, size and mesh axes of each dimension."""
    users: dict[str, str | None] = {}
    for axis, size, mesh_axes in split:
        parts = math.prod(sizes[name] for name in mesh_axes)
        if size % parts:
            near = " or ".join(map(str, nearest_divisors(size, parts)))
            is_kv = axis in ("kv_heads", "act_kv_heads")
            advice = "; trainer.axis_resources: {kv_heads: null} gives each device all of them" if is_kv else ""
            raise UserError(
                f"{what}: {axis!r} of size {size} cannot be split over {parts} devices (mesh axis "
                f"{'+'.join(mesh_axes)}), only over {near}; change that size, the mesh, or {settings}{advice}"
            )
        for name in mesh_axes:
            if name in users:
                raise UserError(
                    f"{what}: {users[name]!r} and {axis!r} cannot both be split over the {name} devices; "
                    f"remove one from {settings}"
                )
            users[name] = axis


def like_parameters(layout: Layout, state: Any, params: Any, shardings: Any) -> Any:
    """Shardings of a tree with arrays that correspond to parameters (an optimizer state), and others.

    An array whose path ends with a parameter's path gets that parameter's sharding; if it lacks one of the parameter's
    dimensions (factored moments), without that dimension. All other arrays are replicated.
    """
    by_path = {
        _trailing_names(path): (param, sharding)
        for (path, param), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }

    def place(path: Any, leaf: Any) -> NamedSharding:
        names = _trailing_names(path)
        match = next((names[start:] for start in range(len(names)) if names[start:] in by_path), None)
        if match is None:
            return layout.replicated
        param, sharding = by_path[match]
        if leaf.shape == param.shape:
            return sharding
        rank = len(param.shape)
        spec = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
        for dim in range(rank):
            if leaf.shape == (*param.shape[:dim], *param.shape[dim + 1 :]):
                return NamedSharding(layout.mesh, PartitionSpec(*spec[:dim], *spec[dim + 1 :]))
        return layout.replicated

    return jax.tree_util.tree_map_with_path(place, state)


def _trailing_names(path: Any) -> tuple[str, ...]:
    """The dictionary keys at the end of a path."""
    keys = itertools.takewhile(lambda key: isinstance(key, jax.tree_util.DictKey), reversed(path))
    return tuple(key.key for key in keys)[::-1]


@dataclass(frozen=True, kw_only=True)
class LocalPart:
    """The part of global [batch, sequence] arrays of a `shape` that this process reads: ascending `rows`, `columns`."""

    sharding: NamedSharding
    shape: tuple[int, int]
    rows: np.ndarray
    columns: range

    @classmethod
    def of(cls, sharding: NamedSharding, batch_size: int, length: int) -> "LocalPart":
        """The part that this process's devices hold."""
        rows: set[int] = set()
        columns: set[int] = set()
        for index in sharding.addressable_devices_indices_map((batch_size, length)).values():
            assert index is not None
            rows.update(range(*index[0].indices(batch_size)))
            columns.update(index[1].indices(length)[:2])
        return cls(
            sharding=sharding,
            shape=(batch_size, length),
            rows=np.array(sorted(rows), dtype=np.int64),
            columns=range(min(columns), max(columns)),
        )

    def cut(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This part of global arrays."""
        return {name: array[self.rows, self.columns.start : self.columns.stop] for name, array in batch.items()}

    def place(self, batch: Mapping[str, np.ndarray]) -> Any:
        """Global arrays on the devices, built from this process's part."""

        def place(local: np.ndarray) -> jax.Array:
            def of_device(index: Any) -> np.ndarray:
                first, last, _ = index[0].indices(self.shape[0])
                begin, end, _ = index[1].indices(self.shape[1])
                row, column = int(np.searchsorted(self.rows, first)), begin - self.columns.start
                return local[row : row + last - first, column : column + end - begin]

            return jax.make_array_from_callback(self.shape, self.sharding, of_device)

        return {name: place(local) for name, local in batch.items()}


def bytes_per_device(tree: Any, shardings: Any) -> int:
    """Bytes of a tree of (abstract) arrays on one device."""
    parts = jax.tree.map(
        lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize, tree, shardings
    )
    return sum(jax.tree.leaves(parts))
