"""Averages of the parameters against plain Python: values, dtypes, and the average in the training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import quick

from lmtrain.run.trainer import EmaConfig, EmaDecaySqrtConfig
from lmtrain.train.step.state import TrainState, build_averaging, move_average, new_average

EMA = EmaConfig(beta=0.9)
SQRT = EmaDecaySqrtConfig(beta=0.9, switch_step=20, decay_steps=50, epsilon=0.01)


def plain_share(config, step: int) -> float:
    """The weight of the new parameters after update number `step`, starting at 1."""
    if isinstance(config, EmaConfig) or step < config.switch_step:
        return 1 - config.beta
    since = min((step - config.switch_step) / config.decay_steps, 1)
    return max(config.epsilon, 1 - since**0.5)


@pytest.mark.parametrize("config", [SQRT, EmaDecaySqrtConfig(beta=0.98, switch_step=10, decay_steps=10, epsilon=0.01)])
def test_the_weight_of_each_step_equals_plain_python(config):
    share = build_averaging(config)
    steps = [1, 2, 9, 10, 11, 19, 20, 21, 45, 69, 70, 71, 10_000, 2**31 - 1]
    found = [float(share(jnp.int32(step))) for step in steps]
    assert found == pytest.approx([plain_share(config, step) for step in steps], rel=1e-5)


def test_without_a_config_there_is_no_average():
    assert build_averaging(None) is None


def test_the_average_of_bfloat16_parameters_moves_by_less_than_bfloat16_can_represent():
    """With the default decay, 0.999: 3,000 updates move it by 95 % of the way."""
    share = build_averaging(EmaConfig())
    first = jnp.asarray(np.random.default_rng(1).normal(size=50), jnp.bfloat16)
    after = first * jnp.bfloat16(1.5)

    @jax.jit
    def last(average):
        return jax.lax.fori_loop(0, 3000, lambda step, average: move_average(average, after, share(step)), average)

    expected = np.float64(after) + 0.999**3000 * (np.float64(first) - np.float64(after))
    np.testing.assert_allclose(last(new_average(first)), expected, rtol=1e-4)


# --- in the training step

MODEL = quick.TwoTokenLM(8, 11)
OPTIMIZER = optax.sgd(0.5)
STEP_SQRT = EmaDecaySqrtConfig(beta=0.9, switch_step=3, decay_steps=4)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6)).astype(np.int32)
BATCH = {"tokens": TOKENS, "loss_mask": np.arange(6) < np.array([[5], [5]])}


def initial(dtype: str):
    return jax.tree.map(lambda p: jnp.asarray(p, dtype), quick.random_params(MODEL, 0.3))


@functools.cache
def train(config, dtype: str) -> list[TrainState]:
    """The states before and after each of six steps, on the host."""
    state = quick.new_state(initial(dtype), OPTIMIZER, averages=True)
    step = quick.build_step(MODEL, OPTIMIZER, dtype=dtype, averaging=build_averaging(config))
    states = [jax.device_get(state)]
    for _ in range(6):
        state, _, _ = step(state, BATCH)
        states.append(jax.device_get(state))
    return states


@pytest.mark.parametrize(("config", "dtype"), [(EMA, "float32"), (STEP_SQRT, "float32"), (EMA, "bfloat16")])
def test_the_step_averages_the_parameters_after_each_update_starting_from_the_initial_ones(config, dtype):
    states = train(config, dtype)
    expected = jax.tree.map(np.float64, states[0].params)
    for number, state in enumerate(states):
        if number:
            share = plain_share(config, number)
            expected = jax.tree.map(
                lambda old, new, a=share: (1 - a) * old + a * np.float64(new), expected, state.params
            )
        for found, wanted in zip(jax.tree.leaves(state.ema_params), jax.tree.leaves(expected), strict=True):
            assert found.dtype == np.float32
            # XLA may average the new parameters before it rounds them to bfloat16
            atol = 1e-6 if dtype == "float32" else 1e-3
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=atol, err_msg=f"step {number}")
        assert state.best_params is state.ema_params
    moved = [
        np.abs(np.float32(a) - b).max()
        for a, b in zip(*map(jax.tree.leaves, (states[-1].params, states[-1].ema_params)), strict=True)
    ]
    assert max(moved) > 1e-3


def test_the_average_has_no_influence_on_the_parameters():
    for one, other in zip(train(EMA, "float32"), train(STEP_SQRT, "float32"), strict=True):
        for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_average_is_part_of_the_checkpoint_if_there_is_one():
    last = train(EMA, "float32")[-1]
    assert last.parts["average"] is last.ema_params
    alone = last.replace(ema_params=None)
    assert "average" not in alone.parts
    assert alone.best_params is alone.params
