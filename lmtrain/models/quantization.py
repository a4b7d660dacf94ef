"""Which parameters have 8-bit copies: the matrices of the blocks, except those of routers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from lmtrain.models.layers.quantized import EIGHT_BIT_TYPES, FORMATS, KERNEL, SCALE, Quantized, quantize
from lmtrain.models.params import STORED_SCALE, flatten, unflatten

_BLOCKS, _ROUTER, _EXPERTS = "blocks", "router", "experts"


def copies(params: Any, products: str, experts: bool = True) -> Any:
    """The collection `QUANTIZED` for products in a format (`FORMATS`): 8-bit copies of the blocks' matrices.

    Those that are stored in 8 bits are used as they are. Without `experts`, those of experts have no copy.
    """
    flat = flatten(params)
    found: dict[str, jax.Array] = {}
    for layer in _layers(flat, experts):
        kernel = flat[f"{layer}/{KERNEL}"]
        if kernel.dtype in EIGHT_BIT_TYPES:
            part = Quantized(kernel, flat[f"{layer}/{STORED_SCALE}"])
        else:
            part = by_layer(kernel, products)
        found |= {f"{layer}/{KERNEL}": part.values, f"{layer}/{SCALE}": part.scale}
    return unflatten(found)


def stored(params: Any, storage: str | None, convert: Callable[[jax.Array, str], Quantized] | None = None) -> Any:
    """Frozen parameters with the blocks' matrices in the 8-bit format `storage`, each with its scale next to it. Those
    of experts stay as they are. `convert` converts a stack of matrices [layers, ...]."""
    if storage is None:
        return params
    flat = dict(flatten(params))
    for layer in _layers(flat, experts=False):
        part = (convert or by_layer)(flat.pop(f"{layer}/{KERNEL}"), storage)
        flat |= {f"{layer}/{KERNEL}": part.values, f"{layer}/{STORED_SCALE}": part.scale}
    return unflatten(flat)


def storage_of(abstract: Any) -> str | None:
    """The 8-bit format in which parameters are stored; None: none is."""
    kinds = {leaf.dtype for leaf in jax.tree.leaves(abstract)}
    return next((name for name, types in FORMATS.items() if types.values in kinds), None)


def take_scales(params: Any) -> tuple[Any, Any]:
    """Parameters without the scales of those that are stored in 8 bits, and the collection `QUANTIZED` of these."""
    flat = dict(flatten(params))
    names = [path for path in flat if path.endswith(f"/{STORED_SCALE}")]
    scales = {path.removesuffix(STORED_SCALE) + SCALE: flat.pop(path) for path in names}
    return unflatten(flat), unflatten(scales)


def has_copy(path: Sequence[str], experts: bool = True) -> bool:
    """Whether the parameter at a path of the model's tree has an 8-bit copy; `experts`: those of experts have."""
    *layer, name = path
    is_matrix = name == KERNEL and layer[0] == _BLOCKS and layer[-1] != _ROUTER
    return is_matrix and (experts or _EXPERTS not in layer)


def _layers(flat: Any, experts: bool) -> list[str]:
    return [path.rpartition("/")[0] for path in flat if has_copy(path.split("/"), experts)]


def by_layer(kernel: jax.Array, products: str) -> Quantized:
    """A stack of matrices [layers, ...] in 8 bits, with a scale for each layer."""
    return quantize(kernel, FORMATS[products].values, tuple(range(1, kernel.ndim)))
