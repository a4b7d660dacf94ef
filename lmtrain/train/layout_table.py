"""A table of what is split how: for `lmtrain plan` and the start of a run."""

import math
from typing import Any

import flax.linen as nn
import jax

from lmtrain.models.interface import LanguageModel
from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.mesh import Layout
from lmtrain.train.state import abstract_params


def layout_table(model: LanguageModel, layout: Layout, dtype: str) -> list[str]:
    """One line for each parameter: its dimensions by name, size and mesh axis, and its bytes on each device."""
    boxes: Any = jax.tree_util.tree_leaves_with_path(
        abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    rules = dict(layout.parameter_rules)
    rows = []
    for path, box in boxes:
        named = list(zip(box.names, box.value.shape, strict=True))
        dims = [f"{name} {size:,}{_over(rules.get(name), layout)}" for name, size in named]
        parts = math.prod(layout.mesh.shape[axis] for name in box.names for axis in _axes(rules.get(name)))
        size = math.prod(box.value.shape) * jax.numpy.dtype(dtype).itemsize // parts
        rows.append((jax.tree_util.keystr(path, simple=True, separator="/"), ", ".join(dims), format_bytes(size)))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return [f"{name:<{widths[0]}}  {dims:<{widths[1]}}  {size:>10}" for name, dims, size in rows]


def _axes(mesh_axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()


def _over(mesh_axes: str | tuple[str, ...] | None, layout: Layout) -> str:
    """`/data 4` for a dimension in four parts; nothing for a whole one."""
    split = [f"{axis} {layout.mesh.shape[axis]}" for axis in _axes(mesh_axes) if layout.mesh.shape[axis] > 1]
    return f"/{'+'.join(split)}" if split else ""
