"""Auxiliary losses: named values that blocks add to the training loss, such as the load balance of a router.

    class Router(nn.Module):
        def __call__(self, x_BSD):
            ...
            add_auxiliary(self, "train/load_balance", imbalance_B.sum(), x_BSD.shape[0], coefficient=0.01)

A value is a sum and the weight of that sum. The step adds, for each name,

    coefficient * (sum of totals) / (sum of weights)

over all layers, microbatches and devices, to the mean of the objective, and logs the quotient under the name; it logs
the objective itself, without auxiliary losses, as `train/loss`. With a coefficient of 0 the value is only a metric.

Evaluation, benchmarks, sampling and estimates of the Hessian leave auxiliary losses out, and compute nothing for them.
"""

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, without_kernels

# The collection of variables that models sow into.
AUXILIARY = "auxiliary"


class Auxiliary(struct.PyTreeNode):
    """Sums over positions, float32: scalars; of several layers, [N] each."""

    total: jax.Array
    weight: jax.Array
    coefficient: float = struct.field(pytree_node=False)


def add_auxiliary(module: nn.Module, name: str, total: Any, weight: Any, coefficient: float) -> None:
    """Add a sum and its weight, both scalars over the entire batch that `module` sees; no gradient flows to `weight`.

    `name` is that of the logged metric, `train/...`. All layers that use a name have the same coefficient.
    """
    weight = jax.lax.stop_gradient(jnp.asarray(weight, jnp.float32))
    module.sow(AUXILIARY, name, Auxiliary(jnp.asarray(total, jnp.float32), weight, coefficient))


def collect(sown: Mapping[str, Any]) -> dict[str, Auxiliary]:
    """What a model has sown, by name: [N] sums over positions, of all layers that use the name."""
    sums: dict[str, Auxiliary] = {}
    leaves = jax.tree_util.tree_leaves_with_path(sown.get(AUXILIARY, {}), is_leaf=lambda leaf: type(leaf) is Auxiliary)
    for path, value in leaves:
        name = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)][-1]
        if name in sums and sums[name].coefficient != value.coefficient:
            raise ValueError(f"add_auxiliary: {name} has two coefficients; give them different names")
        value = jax.tree.map(jnp.ravel, value)
        sums[name] = jax.tree.map(lambda *parts: jnp.concatenate(parts), sums[name], value) if name in sums else value
    return sums


@functools.lru_cache(maxsize=8)
def has_auxiliary(model: LanguageModel) -> bool:
    """Whether training adds auxiliary losses."""
    model = without_kernels(model)
    params = nn.meta.unbox(abstract_params(model))
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    with nn.logical_axis_rules([]):  # two tokens do not divide over devices
        _, sown = jax.eval_shape(
            lambda params, tokens: model.apply({"params": params}, tokens, True, method="hidden", mutable=[AUXILIARY]),
            params,
            tokens,
        )
    return bool(jax.tree.leaves(sown))
