"""Learning-rate schedules: pure functions of the number of completed updates; and their plot."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lmtrain.optim.config import OptimizerConfig, ScheduleConfig, build_cycles
from lmtrain.runtime.errors import UserError

Schedule = Callable[[jax.Array | int], jax.Array]

# Number of steps in a cycle for which inv_sqrt stays at the peak.
_INV_SQRT_STEPS = 10_000


def build_schedule(config: ScheduleConfig, num_train_steps: int) -> Schedule:
    """Build the schedule. With peak P and final rate m = P * min_lr_ratio, in a cycle with w warmup and d decay steps:

    warmup    linear to P in w steps, from 0, in later cycles from the final rate of the previous cycle
    stable    P, until d steps before the end of the cycle

    and t steps after the start of the decay:

    constant  P
    linear    P + (m - P) * t / d
    wsd       the same
    cosine    m + (P - m) * (1 + cos(pi * t / d)) / 2
    inv       P / (1 + (P / m - 1) * max(t, 1) / d)
    inv_sqrt  P * min(1, sqrt(10000 / (t + w))), at least m, independent of d

    If `decay` is null, the decay starts right after the warmup, with wsd in the last fifth of the cycle. After the last
    step the rate is constant. The first update of a run with warmup has rate 0.
    """
    cycles = build_cycles(config, num_train_steps)
    peak, end = config.learning_rate, config.learning_rate * config.min_lr_ratio

    def decayed(t: jax.Array, w: jax.Array, d: jax.Array) -> jax.Array:
        progress = jnp.where(d > 0, t / jnp.maximum(d, 1), 0.0)
        match config.lr_schedule:
            case "linear" | "wsd":
                return peak + (end - peak) * progress
            case "cosine":
                return end + (peak - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
            case "inv":
                return peak / (1.0 + (peak / end - 1.0) * jnp.maximum(t, 1) / jnp.maximum(d, 1))
            case "inv_sqrt":
                return jnp.maximum(end, peak * jnp.minimum(1.0, jnp.sqrt(_INV_SQRT_STEPS / jnp.maximum(t + w, 1))))
        return jnp.full_like(progress, peak)

    starts, ends, warmups, decays = (
        jnp.array([getattr(cycle, name) for cycle in cycles], jnp.int32) for name in ("start", "end", "warmup", "decay")
    )
    before = jnp.zeros(1)
    if len(cycles) > 1:  # each operation outside of a program is compiled on its own
        before = jnp.concatenate([before, decayed(decays, warmups, decays)[:-1]])

    def rate(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.int32)
        k = jnp.searchsorted(starts, step, side="right") - 1
        now, w, d = step - starts[k], warmups[k], decays[k]
        rising = before[k] + (peak - before[k]) * now / jnp.maximum(w, 1)
        t = step - (ends[k] - d)
        falling = jnp.where(t < 0, peak, decayed(jnp.clip(t, 0, d), w, d))
        return jnp.where(now < w, rising, falling).astype(jnp.float32)

    return rate


_MAX_POINTS = 5000


def plot_learning_rate(config: OptimizerConfig, steps: int, path: str) -> None:
    """Write a plot in the format of the file's extension. Raises `UserError` if it cannot be written."""
    import numpy as np
    from matplotlib.figure import Figure

    at = np.unique(np.linspace(0, steps - 1, min(steps, _MAX_POINTS)).astype(np.int32))
    rates = jax.vmap(build_schedule(config, steps))(jnp.asarray(at))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(at, np.asarray(rates))
    axes.set(xlabel="step", ylabel="learning rate", title=f"{config.type}, {config.lr_schedule}")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(os.path.expanduser(path))
    except (OSError, ValueError) as error:  # missing folder, unsupported extension
        raise UserError(f"--plot-lr {path}: {error}") from None
