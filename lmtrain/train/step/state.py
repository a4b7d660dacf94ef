"""The training state: parameters, optimizer state, and the number of updates done."""

from collections.abc import Mapping
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

# Fields of the state -> parts of a checkpoint, whose names never change.
ON_DISK = {"params": "params", "opt_state": "optimizer", "ema_params": "average"}


class TrainState(struct.PyTreeNode):
    """Training state. `step`: int32 scalar; the others: trees of arrays, `ema_params` None without model averaging."""

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any = None

    @property
    def best_params(self) -> Any:
        """The parameters to export: the average if there is one."""
        return self.params if self.ema_params is None else self.ema_params

    @property
    def parts(self) -> dict[str, Any]:
        """Parts of a checkpoint, besides the step, by their names in it (`ON_DISK`); no `average` without averaging."""
        return {name: part for field, name in ON_DISK.items() if (part := getattr(self, field)) is not None}

    @classmethod
    def from_parts(cls, step: Any, parts: Mapping[str, Any]) -> "TrainState":
        """The inverse of `parts`."""
        return cls(step, **{field: parts[name] for field, name in ON_DISK.items() if name in parts})


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
    """An initial state, each array computed on its devices. The same seed gives the same values on any mesh."""

    def init(key: jax.Array) -> TrainState:
        params = jax.tree.map(lambda p: p.astype(dtype), nn.meta.unbox(initializer(model)(key)))
        ema_params = None if shardings.ema_params is None else jax.tree.map(jnp.copy, params)
        return TrainState(jnp.int32(0), params, optimizer.init(params), ema_params)

    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))
