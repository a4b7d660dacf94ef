"""Sophia compared with numpy; the interval of Hessian estimates; convergence compared with Adam."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lmtrain.optim.config import AdamConfig, SophiaGConfig, SophiaHConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.sophia import scale_by_sophia

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(size=(3, 2)).astype(np.float32), "b": RNG.normal(size=4).astype(np.float32)}
DEFAULTS = {
    "beta1": 0.9,
    "beta2": 0.8,
    "epsilon": 1e-3,
    "gamma": 0.5,
    "clip_threshold": 1.0,
    "update_interval": 3,
    "rng_seed": 7,
}


def estimate(key):
    """Random values for each parameter, about a third of them negative."""
    keys = dict(zip(PARAMS, jax.random.split(key), strict=True))
    return {name: 0.5 + jax.random.normal(keys[name], leaf.shape) for name, leaf in PARAMS.items()}


def plain_sophia(gradients, estimates, beta1, beta2, epsilon, gamma, clip_threshold, update_interval, rng_seed):
    """The updates of one leaf, in float64; `estimates[t]` is the Hessian estimate of step t."""
    m = h = np.zeros(gradients[0].shape)
    updates = []
    for t, g in enumerate(gradients):
        m = beta1 * m + (1 - beta1) * g
        if t % update_interval == 0:
            h = beta2 * h + (1 - beta2) * estimates[t]
        update = m / (1 - beta1 ** (t + 1)) / np.maximum(gamma * h, epsilon)
        updates.append(update if clip_threshold is None else np.clip(update, -clip_threshold, clip_threshold))
    return updates


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_threshold": None},
        {"clip_threshold": 0.05, "gamma": 0.01},
        {"update_interval": 1, "beta2": 0.99},
        {"beta1": 0.0, "beta2": 0.0},
    ],
    ids=str,
)
def test_updates_follow_the_formula(settings):
    settings = DEFAULTS | settings
    optimizer = scale_by_sophia(**settings)
    gradients = [jax.tree.map(lambda p: RNG.normal(size=p.shape).astype(np.float32), PARAMS) for _ in range(12)]
    state, found = optimizer.init(PARAMS), []
    update = jax.jit(functools.partial(optimizer.update, hessian=estimate))
    for gradient in gradients:
        direction, state = update(gradient, state)
        found.append(direction)
    estimates = [estimate(jax.random.fold_in(jax.random.key(settings["rng_seed"]), t)) for t in range(12)]
    for name in PARAMS:
        expected = plain_sophia([g[name] for g in gradients], [np.float64(e[name]) for e in estimates], **settings)
        np.testing.assert_allclose([u[name] for u in found], expected, rtol=1e-4, atol=1e-5)


def test_where_the_curvature_is_not_positive_the_update_is_the_sign():
    optimizer = scale_by_sophia(**DEFAULTS | {"epsilon": 1e-12, "gamma": 1.0})
    curvature = jnp.float32([-5, 0, 1e-20, 5])
    gradient = np.float32([0.1, -0.2, 0.3, 0.4])
    update, _ = optimizer.update(gradient, optimizer.init(gradient), hessian=lambda key: curvature)
    # the estimate is (1 - beta2) * 5 = 1 after the first
    np.testing.assert_allclose(update, [1, -1, 1, 0.4], rtol=1e-5)


@pytest.mark.parametrize("interval", [1, 3, 10])
def test_the_hessian_is_estimated_only_when_due_with_a_new_key_each_time(interval):
    called = []

    def marker(key):
        jax.debug.callback(lambda data: called.append(tuple(data.tolist())), jax.random.key_data(key))
        return jax.tree.map(jnp.ones_like, PARAMS)

    optimizer = scale_by_sophia(**DEFAULTS | {"update_interval": interval})
    update, state = jax.jit(functools.partial(optimizer.update, hessian=marker)), optimizer.init(PARAMS)
    counts, marks = [], []
    for _ in range(21):
        _, state = update(PARAMS, state)
        jax.effects_barrier()
        counts.append(len(called))
        marks.append(float(state.hessian["b"][0]))
    due = [t // interval + 1 for t in range(21)]  # at steps 0, interval, 2 * interval, ...
    assert counts == due
    np.testing.assert_allclose(marks, [1 - 0.8**number for number in due], rtol=1e-5)
    assert len(set(called)) == len(called)
    assert int(state.step) == 21


def test_estimates_depend_on_the_seed():
    def first(seed):
        optimizer = scale_by_sophia(**DEFAULTS | {"rng_seed": seed})
        return optimizer.update(PARAMS, optimizer.init(PARAMS), hessian=estimate)[1].hessian["b"].tolist()

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize("config", [SophiaHConfig, SophiaGConfig])
def test_all_settings_of_the_config_are_used(config):
    settings = DEFAULTS | {"beta1": 0.7, "rng_seed": 3}
    built = build_optimizer(config(**settings, max_grad_norm=None), lambda count: 0.1)
    gradient = jax.tree.map(lambda p: p + 1, PARAMS)
    by_hand = scale_by_sophia(**settings)
    expected, _ = by_hand.update(gradient, by_hand.init(PARAMS), hessian=estimate)
    updates, _ = built.update(gradient, built.init(PARAMS), PARAMS, hessian=estimate)
    for one, other in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, -0.1 * other, rtol=1e-6)


def test_moments_have_the_parameters_types_and_updates_the_gradients():
    optimizer = scale_by_sophia(**DEFAULTS)
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    update, state = optimizer.update(half, optimizer.init(half), hessian=estimate)  # the estimate is float32
    assert {leaf.dtype for leaf in jax.tree.leaves((update, state.mu, state.hessian))} == {jnp.bfloat16.dtype}


def best_of(config, learning_rates, curvature, start, num_steps: int) -> float:
    """The minimum over the learning rates of sum(curvature * x^2) / 2 after `num_steps` steps."""

    def final(rate):
        optimizer = build_optimizer(config, lambda count: rate)

        def step(carry, _):
            x, state = carry
            updates, state = optimizer.update(
                curvature * x, state, x, loss=jnp.float32(0), hessian=lambda key: curvature
            )
            return (optax.apply_updates(x, updates), state), None

        (x, _), _ = jax.lax.scan(step, (start, optimizer.init(start)), None, num_steps)
        return (curvature * x**2).sum() / 2

    return float(jnp.nanmin(jax.jit(jax.vmap(final))(jnp.float32(learning_rates))))


def test_on_an_ill_conditioned_quadratic_sophia_ends_lower_than_adam():
    """Curvatures from 0.01 to 100. At a constant rate Adam oscillates around the minimum, while Sophia, which gets the
    exact curvature, converges. Default settings, except Sophia's momentum, which is set to Adam's."""
    curvature, start = jnp.logspace(-2, 2, 9), jnp.float32([3, 0.1, 1, 2, 0.5, 1, 0.2, 3, 1])
    rates = np.geomspace(1e-3, 1, 13)
    adam = best_of(AdamConfig(max_grad_norm=None), rates, curvature, start, 300)
    sophia = best_of(SophiaGConfig(gamma=1.0, beta1=0.9, max_grad_norm=None), rates, curvature, start, 300)
    assert adam < (curvature * start**2).sum() / 2 * 1e-4  # Adam converges too
    assert sophia < adam / 1000
