"""The load of experts: the number of selections of each, summed over a step, and what follows from it."""

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

# The collection of variables with the load of each router, and the name in it.
LOAD = "expert_load"
_NAME = "load"
# Name of the parameter of a router that balances the load; always float32, since its updates are small.
BIAS = "balance_bias"


def add_load(module: nn.Module, selected_E: jax.Array) -> None:
    """Sow the number of selections of each expert, over the entire batch that `module` sees."""
    module.sow(LOAD, _NAME, jax.lax.stop_gradient(selected_E.astype(jnp.float32)))


def collect_load(sown: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The loads by the path of their router, [N, E] for the N layers of a stack that have one."""
    return {"/".join(path[:-1]): values[0] for path, values in flatten_dict(sown.get(LOAD, {})).items()}


def load_metrics(loads: Mapping[str, jax.Array], num_devices: int) -> dict[str, jax.Array]:
    """Loads relative to the mean of the layer, [N] each for the N layers with experts.

    `moe/max_load` and `moe/min_load` of an expert, `moe/dead_experts`, the number without any token, and
    `moe/max_device_load` if experts are split over `num_devices` > 1 devices.
    """
    load = jnp.concatenate([jnp.atleast_2d(load) for load in loads.values()])
    mean = load.mean(-1, keepdims=True)
    relative = load / jnp.where(mean > 0, mean, 1)
    metrics = {
        "moe/max_load": relative.max(-1),
        "moe/min_load": relative.min(-1),
        "moe/dead_experts": (load == 0).sum(-1).astype(jnp.float32),
    }
    if num_devices > 1:
        metrics["moe/max_device_load"] = relative.reshape(len(relative), num_devices, -1).mean(-1).max(-1)
    return metrics


# How metrics of the load are reduced over layers.
REDUCE: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "moe/max_load": jnp.max,
    "moe/min_load": jnp.min,
    "moe/dead_experts": jnp.sum,
    "moe/max_device_load": jnp.max,
}
# Key of a step's metrics that holds those of each layer.
BY_LAYER = "by_layer"


def balanced(updates: Any, loads: Mapping[str, jax.Array], rate: float) -> Any:
    """`updates`, with those of the routers' biases replaced: up by `rate` for experts below the mean load, down for
    those above (Wang et al. 2024, algorithm 1). `loads`: see `collect_load`."""

    def replace(path: Any, update: jax.Array) -> jax.Array:
        *router, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if name != BIAS:
            return update
        load = loads["/".join(router)]
        return rate * jnp.sign(load.mean(-1, keepdims=True) - load)

    return jax.tree_util.tree_map_with_path(replace, updates)
