"""Transformations of gradients that Optax lacks: float32 moments, skipped steps, Sophia, the mask of weight decay."""

import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lmtrain.optim.config import AdamConfig, GroupConfig, MuonConfig, ScheduleConfig, SophiaConfig
from lmtrain.runtime.errors import UserError


def in_float32(inner: optax.GradientTransformation, narrow: Sequence[str] = ()) -> optax.GradientTransformation:
    """`inner`, computed in float32, with a float32 state; updates keep their dtype. The fields `narrow` of the state,
    trees like the parameters, are stored in the dtype of the parameters.

    Averages of squared gradients have to be float32: with a decay of 0.999 they fall by 0.1 % in a step at most, which
    bfloat16 rounds away, so that they would never fall. First moments, with decays up to 0.99, move in bfloat16.
    """

    def init(params: Any) -> Any:
        state = inner.init(widen(params))
        return state._replace(**{name: _like(getattr(state, name), params) for name in narrow})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        stored = {name: getattr(state, name) for name in narrow}
        wide = state._replace(**{name: widen(tree) for name, tree in stored.items()})
        new_updates, new = inner.update(widen(updates), wide, None if params is None else widen(params))
        new = new._replace(**{name: _like(getattr(new, name), tree) for name, tree in stored.items()})
        return _like(new_updates, updates), new

    return optax.GradientTransformation(init, update)


def widen(tree: Any) -> Any:
    """The tree with arrays of fewer bits than float32 in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _like(tree: Any, other: Any) -> Any:
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, other)


def clip_by_norm(limit: float) -> optax.GradientTransformation:
    """Updates scaled to the norm `limit` if theirs is greater, by one factor. `optax.clip_by_global_norm` divides
    each value, and XLA then writes the clipped gradient to memory instead of computing it where it is used."""

    def clip(updates: Any, _: Any) -> Any:
        factor = jnp.minimum(1.0, limit / optax.tree.norm(updates))
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)

    return optax.stateless(clip)


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


# Sophia: momentum divided by an estimate of the Hessian's diagonal, with clipping (Liu et al. 2023).
#
# optax's `contrib.sophia` calls the loss itself, on one full batch. Here the train step computes the estimate, so that
# gradient accumulation, sharding and mixed precision are the same as for the gradient.

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


_MATRICES = ("kernel", "lora_a", "lora_b")


# Ends of the paths of parameters whose initial values are random.
_WITH_STD = ("/kernel", "/embedding")
_NO_GROUP = GroupConfig.model_construct(match="")


def groups_of(config: ScheduleConfig, params: Any) -> Any:
    """The group of each parameter, the first that matches it; `_NO_GROUP` without one."""
    return jax.tree.map(
        lambda path: next((g for g in config.groups if re.match(g.match, path)), _NO_GROUP), _paths(params)
    )


def initial_values(config: ScheduleConfig, key: jax.Array, params: Any) -> Any:
    """New parameters, with those of groups that have an `initial_std` replaced, each drawn from `key` and its path."""

    def one(path: str, group: GroupConfig, value: jax.Array) -> jax.Array:
        if group.initial_std is None:
            return value
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return (group.initial_std * jax.random.normal(own, value.shape)).astype(value.dtype)

    return jax.tree.map(one, _paths(params), groups_of(config, params), params)


def check_groups(config: ScheduleConfig, params: Any, labels: Any) -> None:
    """Raise `UserError` for a group without effect. `labels` are `adam` for the parameters that Adam updates."""
    paths = jax.tree.leaves(_paths(params))
    chosen = list(zip(jax.tree.leaves(groups_of(config, params)), jax.tree.leaves(labels), strict=True))
    for number, group in enumerate(config.groups):
        name = f"optimizer.groups[{number}]: {group.match!r}"
        if not any(re.match(group.match, path) for path in paths):
            raise UserError(f"{name} matches no parameter path; expected one of {', '.join(paths)}")
        if group.initial_std is not None and any(
            other is group and not path.endswith(_WITH_STD) for path, (other, _) in zip(paths, chosen, strict=True)
        ):
            raise UserError(f"{name} has an initial_std, which is for paths that end in {' or '.join(_WITH_STD)}")
        own = [label for other, label in chosen if other is group]
        if not own:
            raise UserError(f"{name} matches only parameters of earlier groups; put it before them, or remove it")
        if "adam" not in own and (group.beta1, group.beta2) != (None, None):
            raise UserError(
                f"{name} matches no parameter that Adam updates, so that its beta1 and beta2 have no effect"
            )


def scale_by_adam(config: AdamConfig | MuonConfig) -> optax.GradientTransformation:
    """`optax.scale_by_adam`, whose betas may be those of a parameter's group. The state is the same."""
    nesterov = isinstance(config, AdamConfig) and config.nesterov
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon, nesterov=nesterov)
    if all((group.beta1, group.beta2) == (None, None) for group in config.groups):
        return adam

    def update(gradients: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, Any]:
        groups = groups_of(config, gradients)
        first = jax.tree.map(lambda group: config.beta1 if group.beta1 is None else group.beta1, groups)
        second = jax.tree.map(lambda group: config.beta2 if group.beta2 is None else group.beta2, groups)
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, old, b: b * old + (1 - b) * g, gradients, state.mu, first)
        nu = jax.tree.map(lambda g, old, b: b * old + (1 - b) * jnp.square(g), gradients, state.nu, second)

        def direction(g: jax.Array, m: jax.Array, v: jax.Array, b1: float, b2: float) -> jax.Array:
            mean = m / (1 - b1**count)
            if nesterov:
                mean = b1 * m / (1 - b1 ** (count + 1)) + (1 - b1) * g / (1 - b1**count)
            return mean / (jnp.sqrt(v / (1 - b2**count)) + config.epsilon)

        updates = jax.tree.map(direction, gradients, mu, nu, first, second)
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(adam.init, update)


def _paths(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), params
    )


def decay_mask(config: ScheduleConfig, params: Any) -> Any:
    """True for parameters that decay. Without settings: the layers' matrices, which are leaves named `kernel`, and
    the matrices of LoRA.

    Raises `UserError` for an entry of `weight_decay_modules` that matches no parameter path.
    """
    by_default, modules = config.default_weight_decay_mask, config.weight_decay_modules
    paths = _paths(params)
    entries = [modules] if isinstance(modules, str) else modules or []
    for module in entries:
        if not any(_is_in(module, path, isinstance(modules, str)) for path in jax.tree.leaves(paths)):
            raise UserError(
                f"optimizer.weight_decay_modules: {module!r} matches no parameter path; "
                f"expected one of {', '.join(jax.tree.leaves(paths))}"
            )

    def decays(path: str) -> bool:
        if modules is None and by_default is False:
            return True
        use_default = by_default or (by_default is None and modules is None)
        named = any(_is_in(module, path, isinstance(modules, str)) for module in entries)
        return named or bool(use_default and path.rsplit("/", 1)[-1] in _MATRICES)

    return jax.tree.map(decays, paths)


def _is_in(module: str, path: str, is_pattern: bool) -> bool:
    return re.match(module, path) is not None if is_pattern else module in path
