"""Skipping of bad steps, compared with a plain reimplementation."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pydantic import ValidationError

from lmtrain.optim.config import AdamConfig, SkipStepConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.transforms import skip_bad_steps

PARAMS = {"a": np.float32([1, 2]), "b": np.float32([3])}
DIRECTION = {"a": np.float32([0.48, 0.36]), "b": np.float32([-0.8])}  # of norm 1


def gradient_of_norm(norm: float):
    return jax.tree.map(lambda x: x * np.float32(norm), DIRECTION)


class Plain:
    """Reimplementation with Python floats: call `skips(loss, norm)` for each step."""

    def __init__(self, length: int, sigma_factor: float):
        self.length, self.sigma_factor = length, sigma_factor
        self.losses: list[float] = []
        self.norms: list[float] = []

    def skips(self, loss: float, norm: float) -> bool:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return True
        enough = len(self.losses) >= max(2, self.length / 2)
        skip = enough and (self._is_high(loss, self.losses) or self._is_high(norm, self.norms))
        self.losses.append(loss)
        self.norms.append(norm)
        return skip

    def _is_high(self, value: float, past: list[float]) -> bool:
        last = past[-self.length :]
        mean = sum(last) / len(last)
        return value > mean + self.sigma_factor * math.sqrt(sum((x - mean) ** 2 for x in last) / len(last))


def random_steps(seed: int, number: int) -> list[tuple[float, float]]:
    """Losses and norms around a falling mean, some far above it, some not finite."""
    rng = np.random.default_rng(seed)
    steps = []
    for step in range(number):
        loss, norm = 5 - step / number + rng.normal() * 0.3, 1 + abs(rng.normal()) * 0.2
        kind = rng.random()
        if kind < 0.03:
            loss *= rng.uniform(1.3, 5)
        elif kind < 0.06:
            norm *= rng.uniform(1.5, 50)
        elif kind < 0.08:
            loss = [math.nan, math.inf, -math.inf][rng.integers(3)]
        elif kind < 0.1:
            norm = [math.nan, math.inf][rng.integers(2)]
        steps.append((loss, norm))
    return steps


@pytest.mark.parametrize(("length", "sigma_factor"), [(2, 1.0), (8, 2.0), (32, 3.0), (128, 6.0)])
def test_the_same_steps_are_skipped_as_by_a_plain_reimplementation(length, sigma_factor):
    inner = optax.scale_by_adam()
    optimizer = skip_bad_steps(inner, length, sigma_factor)
    update, inner_update = jax.jit(optimizer.update), jax.jit(inner.update)
    state, kept = optimizer.init(PARAMS), inner.init(PARAMS)
    plain = Plain(length, sigma_factor)
    skipped = []
    for step, (loss, norm) in enumerate(random_steps(length, 300)):
        gradient = gradient_of_norm(norm)
        # the float32 values that the optimizer uses, so that rounding cannot change a decision
        skip = plain.skips(float(np.float32(loss)), float(jnp.float32(optax.tree.norm(gradient))))
        updates, state = update(gradient, state, PARAMS, loss=np.float32(loss))
        if skip:
            skipped.append(step)
            expected = jax.tree.map(np.zeros_like, PARAMS)
        else:
            expected, kept = inner_update(gradient, kept)
        for found, wanted in zip(
            jax.tree.leaves((updates, state.inner)), jax.tree.leaves((expected, kept)), strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=f"step {step}")
        assert int(state.skipped) == len(skipped), step
    assert 15 < len(skipped) < 200
    assert int(state.seen) == len(plain.losses)


def test_in_an_optimizer_norms_are_taken_before_clipping_and_skipped_steps_do_not_decay():
    config = AdamConfig(
        skip_bad_steps={"rolling_interval_length": 4, "sigma_factor": 3}, weight_decay=0.5, max_grad_norm=1
    )
    optimizer = build_optimizer(config, lambda count: 0.1)
    params = {"kernel": np.float32([[1, 2]])}
    state = optimizer.init(params)
    for _ in range(4):
        updates, state = optimizer.update({"kernel": np.float32([[3, 4]])}, state, params, loss=np.float32(1))
        assert np.abs(updates["kernel"]).min() > 0
    # after clipping, all gradients here have norm 1
    updates, after = optimizer.update({"kernel": np.float32([[30, 40]])}, state, params, loss=np.float32(1))
    np.testing.assert_array_equal(updates["kernel"], [[0, 0]])
    assert int(optax.tree.get(after, "skipped")) == 1
    # the schedule counts skipped steps too
    assert int(after[-1].step) == int(state[-1].step) + 1 == 5


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (False, None),
        (True, SkipStepConfig(rolling_interval_length=128, sigma_factor=6.0)),
        (16, SkipStepConfig(rolling_interval_length=16, sigma_factor=6.0)),
        (
            {"rolling_interval_length": 9, "sigma_factor": 2},
            SkipStepConfig(rolling_interval_length=9, sigma_factor=2.0),
        ),
        ({"sigma_factor": 2}, SkipStepConfig(rolling_interval_length=128, sigma_factor=2.0)),
    ],
)
def test_all_forms_of_the_setting(value, expected):
    config = AdamConfig(skip_bad_steps=value)
    assert config.skip_step == expected
    assert AdamConfig.model_validate_json(config.model_dump_json()).skip_step == expected
    losses = optax.tree.get(build_optimizer(config, lambda count: 0.1).init(PARAMS), "losses")
    assert losses is None if expected is None else losses.shape == (expected.rolling_interval_length,)


@pytest.mark.parametrize("value", [1, -3, 2.5, {"rolling_interval_length": 1}, {"sigma_factor": 0}, {"length": 4}])
def test_invalid_intervals_are_refused(value):
    """`1` is an interval that is too short, and is not read as `true`."""
    with pytest.raises(ValidationError):
        AdamConfig(skip_bad_steps=value)
