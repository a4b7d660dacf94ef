"""Construction of the optimizer as one optax transformation: direction, weight decay and learning rate."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lmtrain.optim.config import (
    AdafactorConfig,
    AdamConfig,
    ClippedConfig,
    GroupConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SophiaConfig,
)
from lmtrain.optim.muon import labels_of, muon_or_adam
from lmtrain.optim.qk_clip import clip_qk
from lmtrain.optim.schedules import Schedule
from lmtrain.optim.transforms import (
    check_groups,
    clip_by_norm,
    decay_mask,
    groups_of,
    in_float32,
    scale_by_adam,
    scale_by_sophia,
    skip_bad_steps,
)


class LearningRateState(NamedTuple):
    """State of the schedule. `step` int32: number of updates; `learning_rate` float32: rate of the last update."""

    step: jax.Array
    learning_rate: jax.Array


def build_optimizer(
    config: OptimizerConfig, schedule: Schedule, axes: Any = None, factors: Mapping[str, Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    """update = -rate * (direction(gradients, clipped) + weight_decay * parameter, where it decays).

    `axes` are the logical names of each parameter's dimensions, which Muon and Adafactor need. In addition to
    gradients, state and parameters, `update` takes `loss` (for `skip_bad_steps`), `hessian` (for Sophia) and `scores`
    (for `qk_clip`). `factors`
    are trees like the parameters, `gradient`, `epsilon` and `rate`: of the gradient before it is clipped, of Adam's
    epsilon, and of the learning rate of the direction, but not of weight decay; None: 1.
    """
    limit = config.max_grad_norm if isinstance(config, ClippedConfig) else None
    direction = [clip_by_norm(limit)] if limit else []
    if factors is None:
        direction += _direction(config, axes)
    else:
        epsilon = jax.tree.map(lambda factor: 1 / factor, factors["epsilon"])
        direction = [_multiply(factors["gradient"]), *direction, _multiply(epsilon), *_direction(config, axes)]
        direction.append(_multiply(factors["rate"]))
    decay = _decay(config, axes)
    if config.groups:
        decay = _by_group(config, axes, decay)
    update: optax.GradientTransformation = optax.chain(*direction, *decay)
    if isinstance(config, AdamConfig) and config.skip_step is not None:
        update = skip_bad_steps(update, config.skip_step.rolling_interval_length, config.skip_step.sigma_factor)
    complete = optax.chain(update, scale_by_learning_rate(schedule))
    if isinstance(config, MuonConfig) and config.qk_clip is not None:
        return clip_qk(complete, config.qk_clip, axes)
    return complete


def _multiply(factors: Any) -> optax.GradientTransformation:
    """Multiply each update by its factor, in the update's dtype."""
    return optax.stateless(
        lambda updates, _: jax.tree.map(lambda u, factor: u * jnp.asarray(factor, u.dtype), updates, factors)
    )


def _direction(config: OptimizerConfig, axes: Any) -> list[optax.GradientTransformation]:
    match config:
        case AdamConfig():
            return [in_float32(scale_by_adam(config), narrow=["mu"])]
        case LionConfig():
            return [in_float32(optax.scale_by_lion(config.beta1, config.beta2), narrow=["mu"])]
        case MuonConfig():
            return [muon_or_adam(config, axes)]
        case AdafactorConfig():
            return _adafactor(config, axes)
        case SophiaConfig():
            return [scale_by_sophia(config)]


def _decay(config: OptimizerConfig, axes: Any) -> list[optax.GradientTransformation]:
    """Weight decay. With Muon, parameters that Adam updates decay by Adam's learning rate."""
    if not isinstance(config, MuonConfig):
        return [optax.add_decayed_weights(config.weight_decay, mask=partial(decay_mask, config))]
    labels = labels_of(axes)

    def decay(label: str, rate: float) -> optax.GradientTransformation:
        def mask(params: Any) -> Any:
            return jax.tree.map(lambda decays, own: decays and own == label, decay_mask(config, params), labels)

        return optax.add_decayed_weights(config.weight_decay * rate, mask=mask)

    return [decay("muon", 1.0), decay("adam", config.adam_lr / config.learning_rate)]


def _by_group(
    config: OptimizerConfig, axes: Any, decay: list[optax.GradientTransformation]
) -> list[optax.GradientTransformation]:
    """Weight decay, and learning rates relative to the optimizer's, where parameters have groups. The state is that of
    `decay`, so that groups can be added to a run, and removed."""

    def labels_like(params: Any) -> Any:
        label = "adam" if isinstance(config, AdamConfig) else ""
        return labels_of(axes) if isinstance(config, MuonConfig) else jax.tree.map(lambda _: label, params)

    def init(params: Any) -> Any:
        check_groups(config, params, labels_like(params))
        return decay[0].init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(u: jax.Array, p: jax.Array, group: GroupConfig, label: str, decays: bool) -> jax.Array:
            usual = config.adam_lr if isinstance(config, MuonConfig) and label == "adam" else config.learning_rate
            rate = group.learning_rate or usual
            decay = (config.weight_decay if decays else 0.0) if group.weight_decay is None else group.weight_decay
            return u * (rate / usual) + (decay * rate / config.learning_rate) * p.astype(u.dtype)

        groups, labels = groups_of(config, params), labels_like(params)
        return jax.tree.map(one, updates, params, groups, labels, decay_mask(config, params)), state

    unchanged = [
        optax.GradientTransformation(each.init, lambda u, state, params=None: (u, state)) for each in decay[1:]
    ]
    return [optax.GradientTransformation(init, update), *unchanged]


def _adafactor(config: AdafactorConfig, axes: Any) -> list[optax.GradientTransformation]:
    """Same as `optax.adafactor`, without weight decay and learning rate, which `build_optimizer` adds.

    A root mean square is taken over the stacked parameter of all blocks. Heads and head width count as one dimension:
    rows and columns are those of the projection matrix.
    """
    factored = optax.scale_by_factored_rms(True, config.decay_rate, 0, config.min_dim_size_to_factor, config.epsilon)
    parts: list[optax.GradientTransformation] = [_with_merged_heads(in_float32(factored), axes)]
    if config.clipping_threshold is not None:
        parts.append(optax.clip_by_block_rms(config.clipping_threshold))
    if config.multiply_by_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    if config.momentum is not None:
        parts.append(in_float32(optax.ema(config.momentum, debias=False), narrow=["ema"]))
    return parts


def _with_merged_heads(inner: optax.GradientTransformation, axes: Any) -> optax.GradientTransformation:
    """`inner`, applied to parameters with their dimensions `heads, head_dim` merged."""

    def merged(tree: Any) -> Any:
        return jax.tree.map(lambda x, names: x.reshape(_merged_shape(x.shape, names)), tree, axes)

    def init(params: Any) -> Any:
        return inner.init(merged(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        scaled, state = inner.update(merged(updates), state, merged(params))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), scaled, updates), state

    return optax.GradientTransformation(init, update)


def _merged_shape(shape: tuple[int, ...], names: tuple[str | None, ...]) -> tuple[int, ...]:
    merged: list[int] = []
    for before, name, size in zip((None, *names), names, shape, strict=False):
        if name == "head_dim" and before in ("heads", "kv_heads"):
            merged[-1] *= size
        else:
            merged.append(size)
    return tuple(merged)


def scale_by_learning_rate(schedule: Schedule) -> optax.GradientTransformation:
    """Multiply by the negative learning rate, and keep the rate in the state, so that checkpoints contain it."""

    def init(params: Any) -> LearningRateState:
        return LearningRateState(jnp.int32(0), jnp.asarray(schedule(0), jnp.float32))

    def update(updates: Any, state: LearningRateState, params: Any = None) -> tuple[Any, LearningRateState]:
        rate = jnp.asarray(schedule(state.step), jnp.float32)
        updates = jax.tree.map(lambda u: (-rate).astype(u.dtype) * u, updates)
        return updates, LearningRateState(state.step + 1, rate)

    return optax.GradientTransformation(init, update)


def restart_schedule(state: Any) -> Any:
    """The state of `build_optimizer`'s optimizer with the schedule reset to step 0 and unchanged moments."""
    *moments, rate = state
    return (*moments, rate._replace(step=jnp.zeros_like(rate.step)))
