"""What training changes: parameters, optimizer state, and the number of updates done."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, initializer, with_dtype
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import like_parameters, parameter_shardings


class TrainState(struct.PyTreeNode):
    """`step` int32 scalar; `params`, `optimizer` and `average` trees of arrays. `average` is None without averaging."""

    step: Any
    params: Any
    optimizer: Any
    average: Any = None

    @property
    def best_params(self) -> Any:
        """What is exported: the average, where there is one."""
        return self.params if self.average is None else self.average

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds beside the step: `params`, `optimizer`, and `average` if there is one."""
        parts = {"params": self.params, "optimizer": self.optimizer, "average": self.average}
        return {name: part for name, part in parts.items() if part is not None}


def state_shardings(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    dtype: str,
    averages: bool = False,
) -> tuple[TrainState, TrainState]:
    """The abstract `TrainState` of a model with parameters in `dtype`, and the sharding of each of its leaves."""
    boxed = abstract_params(model)
    params = with_dtype(nn.meta.unbox(boxed), dtype)
    shardings = parameter_shardings(layout, boxed)
    moments = jax.eval_shape(optimizer.init, params)
    state = TrainState(jax.ShapeDtypeStruct((), jnp.int32), params, moments, params if averages else None)
    moment_shardings = like_parameters(layout, moments, params, shardings)
    return state, TrainState(layout.replicated, shardings, moment_shardings, shardings if averages else None)


def init_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    shardings: Any,
    *,
    seed: int,
    dtype: str,
) -> TrainState:
    """A fresh state, each array computed where it lives. The same seed gives the same values on any mesh."""

    def init(key: jax.Array) -> TrainState:
        params = jax.tree.map(lambda p: p.astype(dtype), nn.meta.unbox(initializer(model)(key)))
        average = None if shardings.average is None else jax.tree.map(jnp.copy, params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), average)

    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))
