"""QK-clip (Kimi Team 2025, "Kimi K2", algorithm 1): attention scores that grow without bound are scaled back.

With s_h the highest score of head h in the batch and t the threshold, g_h = min(1, t / s_h). After the update, the
products of queries and keys of the head are multiplied by g_h: its queries and its keys by sqrt(g_h). Where several
query heads have one key head, its keys are multiplied by the root of their smallest g, and the queries of each by the
rest of its own, so that a head below the threshold keeps its scores.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

# Names of the layers of attention with queries and keys, and of the axes of their heads.
_LAYERS, _HEADS = ("q", "k", "qkv"), ("heads", "kv_heads")


def clip_qk(
    inner: optax.GradientTransformationExtraArgs, threshold: float, axes: Any
) -> optax.GradientTransformationExtraArgs:
    """The updates of `inner`, with QK-clip; the state is that of `inner`.

    `axes` are the logical names of each parameter's dimensions. `update` takes `scores`: the highest ones [N, H] of the
    N layers, by the path of the module with the layers q and k, or qkv.
    """
    names = flatten_dict(axes, sep="/")

    def update(
        gradients: Any, state: Any, params: Any = None, *, scores: Mapping[str, jax.Array], **extra: Any
    ) -> tuple[Any, Any]:
        updates, state = inner.update(gradients, state, params, **extra)
        values, flat = flatten_dict(params, sep="/"), flatten_dict(updates, sep="/")
        for path, own in names.items():
            module, _, rest = path.rpartition("/")[0].rpartition("/")
            if module in scores and rest in _LAYERS:
                key = next(name for name in (f"{module}/k/kernel", f"{module}/qkv/kernel") if name in names)
                size = next(size for axis, size in zip(names[key], values[key].shape, strict=True) if axis in _HEADS)
                factor = _placed(_factors(scores[module], threshold, size)[rest], own).astype(flat[path].dtype)
                clipped = (values[path] + flat[path]) * factor - values[path]
                flat[path] = jnp.where(factor == 1, flat[path], clipped)
        return unflatten_dict(flat, sep="/"), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _factors(highest_NH: jax.Array, threshold: float, kv_heads: int) -> dict[str, jax.Array]:
    """Of queries [N, H], of keys [N, K], and of both and values together, [N, 3, H]."""
    g_NH = threshold / jnp.maximum(highest_NH, threshold)
    g_NKG = g_NH.reshape(len(g_NH), kv_heads, -1)
    root_NK = jnp.sqrt(g_NKG.min(-1))
    queries = (g_NKG / root_NK[..., None]).reshape(g_NH.shape)
    factors = {"q": queries, "k": root_NK}
    if root_NK.shape == queries.shape:
        factors["qkv"] = jnp.stack([queries, root_NK, jnp.ones_like(queries)], axis=1)
    return factors


def _placed(factor: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """The factor with a dimension for each of `axes`: those of layers, of queries, keys and values, and of heads."""
    sizes = iter(factor.shape)
    return factor.reshape([next(sizes) if axis in ("layers", "qkv", *_HEADS) else 1 for axis in axes])
