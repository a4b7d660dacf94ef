"""The table of how each parameter is split over devices, for `lmtrain plan` and the start of a run."""

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from clu.parameter_overview import make_table

from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, flatten
from lmtrain.runtime.progress import format_bytes
from lmtrain.sharding.axes import as_names
from lmtrain.sharding.mesh import Layout


@dataclass(frozen=True)
class _ParameterRow:
    parameter: str
    dimensions: str
    size: int
    on_each_device: str


def layout_table(model: LanguageModel, layout: Layout, abstract: Any) -> list[str]:
    """A table of the parameters: dimensions by name, size and mesh axis, number of scalars, and bytes per device.

    `abstract` are the parameters as they are stored.
    """
    as_stored = flatten(abstract)
    boxes: Any = jax.tree_util.tree_leaves_with_path(
        abstract_params(model), is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)
    )
    rules = dict(layout.parameter_rules)
    rows = []
    for path, box in boxes:
        named = list(zip(box.names, box.value.shape, strict=True))
        dims = [f"{name} {size:,}{_over(rules.get(name), layout)}" if name else f"{size:,}" for name, size in named]
        parts = math.prod(layout.mesh.shape[axis] for name in box.names for axis in as_names(rules.get(name)))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        size = math.prod(box.value.shape) * as_stored[name].dtype.itemsize // parts
        rows.append(_ParameterRow(name, ", ".join(dims), math.prod(box.value.shape), format_bytes(size)))
    lines: list[str] = make_table(rows).splitlines()
    lines[1] = lines[1].replace("_", " ")  # headings are field names of _ParameterRow
    return lines


def _over(mesh_axes: str | tuple[str, ...] | None, layout: Layout) -> str:
    """`/data 4` for a dimension split into four parts; empty for one that is not split."""
    split = [f"{axis} {layout.mesh.shape[axis]}" for axis in as_names(mesh_axes) if layout.mesh.shape[axis] > 1]
    return f"/{'+'.join(split)}" if split else ""
