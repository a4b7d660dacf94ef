"""Adapters as a tree of arrays: initial values, and merging into the base.

    <layer>/lora_a [r, in], <layer>/lora_b [out, r]     the adapter of a linear layer; with a first dimension in stacks
    <path of a parameter>                               a parameter that is trained in full, instead of the base's

Both are stored in the shapes of PEFT's files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.lora.sites import A, B, Site
from lmtrain.models.params import flatten, unflatten


def init_adapters(sites: Sequence[Site], r: int, key: jax.Array) -> dict[str, Any]:
    """New adapters by path, boxed with their logical names: `lora_a` random, as PEFT initializes it, `lora_b` zero.

    PEFT's `kaiming_uniform_(a, sqrt(5))` is uniform within 1 / sqrt(in).
    """
    flat = {}
    for number, site in enumerate(sites):
        lead, names = ((), ()) if site.layers is None else ((len(site.layers),), ("layers",))
        bound = site.inputs**-0.5
        values = jax.random.uniform(
            jax.random.fold_in(key, number), (*lead, r, site.inputs), jnp.float32, -bound, bound
        )
        flat[f"{site.path}/{A}"] = nn.LogicallyPartitioned(values, (*names, "lora_rank", None))
        zeros = jnp.zeros((*lead, site.outputs, r))
        flat[f"{site.path}/{B}"] = nn.LogicallyPartitioned(zeros, (*names, None, "lora_rank"))
    return flat


def merge_layer(kernel: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """A layer's kernel plus `scale` * (B A)^T in float32; where that is zero, its bits do not change."""
    kernel, a, b = (array.astype(np.float32) for array in (kernel, a, b))
    delta = (np.float32(scale) * (b @ a)).T.reshape(kernel.shape)
    return np.where(delta == 0, kernel, kernel + delta)


def adapted_layers(flat: Mapping[str, Any]) -> list[str]:
    """The paths of the layers with an adapter, in a tree of adapters by path."""
    return sorted(path.removesuffix(f"/{A}") for path in flat if path.endswith(f"/{A}"))


def trained_in_full(flat: Mapping[str, Any]) -> list[str]:
    """The paths of the parameters that are trained in full, in a tree of adapters by path."""
    return [path for path in flat if not path.endswith((f"/{A}", f"/{B}"))]


def start_from(adapters: Any, base: Any) -> Any:
    """The adapters, with the base's values of the parameters that are trained in full."""
    flat, values = flatten(adapters), flatten(base)
    copied = {path: values[path].astype(flat[path].dtype) for path in trained_in_full(flat)}
    return unflatten(flat | copied)
