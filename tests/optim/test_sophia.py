"""Sophia compared with numpy in float64; the interval of Hessian estimates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.optim.config import SophiaHConfig
from lmtrain.optim.transforms import scale_by_sophia

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
    optimizer = scale_by_sophia(SophiaHConfig(**settings))
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


@pytest.mark.parametrize("interval", [1, 3, 10])
def test_the_hessian_is_estimated_only_when_due_with_a_new_key_each_time(interval):
    called = []

    def marker(key):
        jax.debug.callback(lambda data: called.append(tuple(data.tolist())), jax.random.key_data(key))
        return jax.tree.map(jnp.ones_like, PARAMS)

    optimizer = scale_by_sophia(SophiaHConfig(**DEFAULTS | {"update_interval": interval}))
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


def test_moments_have_the_parameters_types_and_updates_the_gradients():
    optimizer = scale_by_sophia(SophiaHConfig(**DEFAULTS))
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    update, state = optimizer.update(half, optimizer.init(half), hessian=estimate)  # the estimate is float32
    assert {leaf.dtype for leaf in jax.tree.leaves((update, state.mu))} == {jnp.bfloat16.dtype}
    assert {leaf.dtype for leaf in jax.tree.leaves(state.hessian)} == {jnp.float32.dtype}
