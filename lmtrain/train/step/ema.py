"""Moving average of the parameters over the last steps, which often predicts better than the last parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.run.trainer import EmaConfig, EmaDecaySqrtConfig

# The number of updates done -> the weight of the current parameters in the average.
Averaging = Callable[[jax.Array], jax.Array]


def build_averaging(config: EmaConfig | EmaDecaySqrtConfig | None) -> Averaging | None:
    """average = (1 - a) average + a parameters, after each update, starting from the initial parameters.

    ema             a = 1 - beta
    ema_decay_sqrt  the same up to `switch_step`, then a = max(1 - sqrt(t / decay_steps), epsilon), t steps after the
                    switch: the average starts at the parameters of that step and moves less and less
    """
    if config is None:
        return None
    if isinstance(config, EmaConfig):
        return lambda step: jnp.float32(1 - config.beta)
    after = config

    def share(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - after.switch_step) / after.decay_steps, 0.0, 1.0)
        return jnp.maximum(jnp.where(step < after.switch_step, 1 - after.beta, 1 - jnp.sqrt(progress)), after.epsilon)

    return share


def move_average(average: Any, params: Any, share: jax.Array) -> Any:
    """average + share * (params - average) for each leaf, of a float32 average."""
    return jax.tree.map(lambda old, new: old + share * (new.astype(jnp.float32) - old), average, params)


def new_average(params: Any) -> Any:
    """A copy of the parameters in float32, whatever their dtype: bfloat16 would round away what an update moves."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)
