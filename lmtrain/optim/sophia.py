"""Sophia: momentum divided by an estimate of the Hessian's diagonal, with clipping (Liu et al. 2023).

optax's `contrib.sophia` calls the loss itself, on one full batch. Here the train step computes the estimate, so that
gradient accumulation, sharding and mixed precision are the same as for the gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lmtrain.optim.config import SophiaConfig
from lmtrain.optim.moments import widen

# key -> an estimate of the Hessian's diagonal, a tree like the parameters
HessianEstimate = Callable[[jax.Array], Any]


class SophiaState(NamedTuple):
    """`step` int32: number of updates; `mu`: momentum, in the parameters' dtype, `hessian`: running estimate, float32;
    both are trees like the parameters."""

    step: jax.Array
    mu: Any
    hessian: Any


def scale_by_sophia(config: SophiaConfig) -> optax.GradientTransformationExtraArgs:
    """m = beta1 m + (1 - beta1) g;  update = clip(m / (1 - beta1^t) / max(gamma h, epsilon), threshold).

    Every `update_interval` updates, starting with the first, h = beta2 h + (1 - beta2) `hessian(key)`. `hessian` is an
    argument of `update`, and is called only then. Where h is not positive, the update is the momentum's sign, clipped.

    The momentum's bias is corrected, as in optax and Levanter. The authors' algorithm 3 does not correct it, so that
    its first updates are smaller: the first one by a factor of 1 - beta1.
    """
    beta1, beta2, limit = config.beta1, config.beta2, config.clip_threshold

    def init(params: Any) -> SophiaState:
        mu = jax.tree.map(jnp.zeros_like, params)
        hessian = jax.tree.map(jnp.zeros_like, widen(params))
        return SophiaState(jnp.int32(0), mu, hessian)

    def update(
        gradients: Any, state: SophiaState, params: Any = None, *, hessian: HessianEstimate, **_: Any
    ) -> tuple[Any, SophiaState]:
        def average(m: jax.Array, g: jax.Array) -> jax.Array:
            mean: jax.Array = beta1 * widen(m) + (1 - beta1) * widen(g)
            return mean.astype(m.dtype)

        mu = jax.tree.map(average, state.mu, gradients)

        def estimate(h: Any) -> Any:
            new = hessian(jax.random.fold_in(jax.random.key(config.rng_seed), state.step))
            return jax.tree.map(lambda a, b: beta2 * a + (1 - beta2) * b.astype(a.dtype), h, new)

        due = state.step % config.update_interval == 0
        h = jax.lax.cond(due, estimate, lambda h: h, state.hessian)
        step = state.step + 1
        correction = 1 - beta1 ** step.astype(jnp.float32)

        def direction(m: jax.Array, h: jax.Array) -> jax.Array:
            ratio = (m / correction / jnp.maximum(config.gamma * h, config.epsilon)).astype(m.dtype)
            return ratio if limit is None else jnp.clip(ratio, -limit, limit)

        return jax.tree.map(direction, mu, h), SophiaState(step, mu, h)

    return optax.GradientTransformationExtraArgs(init, update)
