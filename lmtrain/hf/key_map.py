"""The map between our parameters and a Hugging Face weight file: one table, read in both directions.

Our parameters are a tree with slashes as paths (`blocks/attn/qkv/kernel`), stacked over layers; theirs are flat names,
one per layer (`transformer.h.{layer}.attn.c_attn.weight`). A row says which is which and how the shapes correspond.
Whatever one side has and the other does not is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Row:
    """`ours` <-> `theirs`. With `{layer}` in `theirs`, the first dimension of ours is the layer.

    `rows` is the number of our dimensions (layer apart) that become the first dimension of their matrix, the rest
    become the second; None keeps the shape, 0 flattens to a vector. `transpose` swaps their two dimensions, as
    torch's Linear has them against ours.
    """

    ours: str
    theirs: str
    rows: int | None = None
    transpose: bool = False

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        if self.rows is not None:
            first = int(np.prod(array.shape[: self.rows]))
            array = array.reshape(first, -1) if self.rows else array.reshape(-1)
        # contiguous, because safetensors writes the buffer whatever the strides say
        return np.ascontiguousarray(array.T if self.transpose else array)

    def to_ours(self, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        return np.ascontiguousarray((array.T if self.transpose else array).reshape(shape))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested maps -> paths with slashes."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}/{name}" if prefix else name
        flat.update(flatten(value, path) if isinstance(value, Mapping) else {path: value})
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = value
    return tree


def to_hf(table: Sequence[Row], params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Our parameters as their tensors. Raises ValueError for a parameter without a row, or a row without one."""
    flat = flatten(params)
    _check_names({row.ours for row in table}, set(flat), "parameters")
    tensors: dict[str, np.ndarray] = {}
    for row in table:
        array = np.asarray(flat[row.ours])
        if "{layer}" in row.theirs:
            for layer, part in enumerate(array):
                tensors[row.theirs.format(layer=layer)] = row.to_theirs(part)
        else:
            tensors[row.theirs] = row.to_theirs(array)
    return tensors


def from_hf(
    table: Sequence[Row], tensors: Mapping[str, np.ndarray], shapes: Mapping[str, Any], num_layers: int
) -> dict[str, Any]:
    """Their tensors as our parameters, in the shapes of the tree `shapes`. Raises ValueError for names that differ."""
    flat_shapes = flatten(shapes)
    names = {row: _names(row, num_layers) for row in table}
    _check_names({name for listed in names.values() for name in listed}, set(tensors), "tensors")
    flat: dict[str, np.ndarray] = {}
    for row in table:
        shape = flat_shapes[row.ours].shape
        if "{layer}" in row.theirs:
            flat[row.ours] = np.stack([row.to_ours(tensors[name], shape[1:]) for name in names[row]])
        else:
            flat[row.ours] = row.to_ours(tensors[row.theirs], shape)
    return unflatten(flat)


def _names(row: Row, num_layers: int) -> list[str]:
    if "{layer}" not in row.theirs:
        return [row.theirs]
    return [row.theirs.format(layer=layer) for layer in range(num_layers)]


def _check_names(expected: set[str], found: set[str], what: str) -> None:
    if expected != found:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise ValueError(f"{what} do not match the table: missing {missing[:5]}, unexpected {unexpected[:5]}")
