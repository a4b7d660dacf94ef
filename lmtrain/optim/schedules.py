"""Learning-rate schedules: pure functions of the number of updates done."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lmtrain.optim.config import AdamConfig, FractionOrSteps

Schedule = Callable[[jax.Array | int], jax.Array]


def num_steps(length: FractionOrSteps, whole: int) -> int:
    """An int is a number of steps, a float a fraction of `whole`, rounded down."""
    return length if isinstance(length, int) else int(length * whole)


def build_schedule(config: AdamConfig, num_train_steps: int) -> Schedule:
    """Warmup, a stable part, decay. With peak P, end m = P * min_lr_ratio, warmup w, decay d, t steps into the decay:

    warmup    P * step / w, so that the first update has rate 0
    constant  P
    linear    P + (m - P) * t / d
    cosine    m + (P - m) * (1 + cos(pi * t / d)) / 2

    The decay is the last d steps, all that follow the warmup unless `decay` is set. After the last step the rate stays
    at its final value.
    """
    peak, end = config.learning_rate, config.learning_rate * config.min_lr_ratio
    warmup = num_steps(config.warmup, num_train_steps)
    decay = num_train_steps - warmup if config.decay is None else num_steps(config.decay, num_train_steps)
    begin = num_train_steps - decay

    def rate(step: jax.Array | int) -> jax.Array:
        now = jnp.asarray(step, jnp.float32)
        rising = peak * now / max(warmup, 1)
        progress = jnp.clip((now - begin) / max(decay, 1), 0.0, 1.0)
        if config.lr_schedule == "constant" or decay == 0:
            falling = jnp.full_like(now, peak)
        elif config.lr_schedule == "cosine":
            falling = end + (peak - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        else:
            falling = peak + (end - peak) * progress
        return jnp.where(now < warmup, rising, falling)

    return rate
