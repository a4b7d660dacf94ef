"""Skipping of updates with an outlier loss or gradient norm (OLMo's SkipStep)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lmtrain.optim.moments import widen

_MIN_DEVIATION = 1e-6  # lower bound of the standard deviation, for losses that hardly vary


class SkipStepState(NamedTuple):
    """`losses`, `norms` float32 [length]: the last finite ones; `seen` int32: their number; `skipped` int32."""

    losses: jax.Array
    norms: jax.Array
    seen: jax.Array
    skipped: jax.Array
    inner: Any


def skip_bad_steps(
    inner: optax.GradientTransformation, length: int, sigma_factor: float
) -> optax.GradientTransformationExtraArgs:
    """`inner`, but with a zero update and unchanged state if loss or gradient norm exceeds mean + sigma_factor * std.

    Mean and standard deviation are over the last `length` steps before this one, including skipped ones. Nothing is
    skipped before max(2, length / 2) steps are recorded. Steps with a non-finite loss or norm are always skipped, and
    not recorded. `update` takes the additional argument `loss`.
    """
    inner_extra = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipStepState:
        zeros = jnp.zeros(length, jnp.float32)
        return SkipStepState(zeros, zeros, jnp.int32(0), jnp.int32(0), inner.init(params))

    def update(
        gradients: Any, state: SkipStepState, params: Any = None, *, loss: jax.Array, **extra: Any
    ) -> tuple[Any, SkipStepState]:
        norm = optax.tree.norm(widen(gradients)).astype(jnp.float32)
        loss = loss.astype(jnp.float32)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        known = jnp.arange(length) < state.seen

        def is_outlier(value: jax.Array, past: jax.Array) -> jax.Array:
            number = jnp.maximum(known.sum(), 1)
            mean = jnp.where(known, past, 0).sum() / number
            deviation = jnp.sqrt(jnp.where(known, (past - mean) ** 2, 0).sum() / number)
            return value > mean + sigma_factor * jnp.maximum(deviation, _MIN_DEVIATION)

        enough = state.seen >= max(2, length // 2)
        outlier = is_outlier(loss, state.losses) | is_outlier(norm, state.norms)
        skip = ~finite | (enough & outlier)

        updates, inner_state = inner_extra.update(gradients, state.inner, params, loss=loss, **extra)
        updates = jax.tree.map(lambda u: jnp.where(skip, jnp.zeros_like(u), u), updates)
        inner_state = jax.tree.map(lambda new, old: jnp.where(skip, old, new), inner_state, state.inner)

        def remember(past: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(finite, past.at[state.seen % length].set(value), past)

        return updates, SkipStepState(
            remember(state.losses, loss),
            remember(state.norms, norm),
            state.seen + finite.astype(jnp.int32),
            state.skipped + skip.astype(jnp.int32),
            inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
