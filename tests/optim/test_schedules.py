"""Learning rates at single steps, against reference values of another implementation (peak 1, end 0.1, 100 steps)."""

import jax
import numpy as np
import pytest

from lmtrain.optim.config import AdamConfig
from lmtrain.optim.schedules import build_schedule, num_steps

COSINE = {0: 0, 1: 0.1, 5: 0.5, 10: 1, 11: 0.999726, 50: 0.628142, 55: 0.55, 60: 0.471858, 80: 0.20528, 99: 0.100274}
TABLE = [
    ("cosine", {"warmup": 0.1}, COSINE | {100: 0.1}),
    ("cosine", {"warmup": 10}, COSINE | {100: 0.1}),
    ("linear", {"warmup": 10}, {10: 1, 11: 0.99, 50: 0.6, 99: 0.11, 100: 0.1}),
    ("linear", {"warmup": 10, "decay": 0.2}, {5: 0.5, 79: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 100: 0.1}),
    ("linear", {"warmup": 10, "decay": 20}, {79: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 100: 0.1}),
    ("constant", {"warmup": 0.1}, {0: 0, 5: 0.5, 10: 1, 55: 1, 99: 1}),
    ("constant", {"warmup": 0.1, "decay": 0.5}, {0: 0, 5: 0.5, 10: 1, 55: 1, 99: 1}),
    ("linear", {"warmup": 0}, {0: 1, 50: 0.55, 100: 0.1}),
    ("linear", {"warmup": 1}, {0: 0, 1: 1, 100: 0.1}),
    ("linear", {"warmup": 1.0}, {0: 0, 1: 0.01, 50: 0.5, 99: 0.99}),
    ("linear", {"warmup": 10, "decay": 0}, {5: 0.5, 10: 1, 50: 1, 99: 1}),
]


def schedule(shape: str, settings: dict, steps: int = 100):
    return build_schedule(AdamConfig(learning_rate=1.0, min_lr_ratio=0.1, lr_schedule=shape, **settings), steps)


@pytest.mark.parametrize(("shape", "settings", "expected"), TABLE)
def test_rates_are_those_of_the_reference(shape, settings, expected):
    rate = schedule(shape, settings)
    assert {step: float(rate(step)) for step in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize("settings", [{"warmup": 10}, {"warmup": 10, "decay": 0.2}])
def test_after_the_last_step_the_rate_stays_at_the_end_value(shape, settings):
    rate = schedule(shape, settings)
    assert [float(rate(step)) for step in (100, 101, 10_000)] == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_without_any_decay_the_rate_stays_at_the_peak_after_the_last_step(shape):
    rate = schedule(shape, {"warmup": 10, "decay": 0})
    assert [float(rate(step)) for step in (99, 100, 101, 1000)] == pytest.approx([1.0] * 4)


def test_rates_scale_with_the_peak_and_the_end_may_be_zero():
    rate = build_schedule(AdamConfig(learning_rate=3e-4, min_lr_ratio=0, lr_schedule="linear", warmup=0), 100)
    assert [float(rate(step)) for step in (0, 50, 100)] == pytest.approx([3e-4, 1.5e-4, 0])


def test_a_traced_step_gives_the_same_rates():
    rate = schedule("cosine", {"warmup": 0.1})
    steps = np.arange(0, 101, 7)
    np.testing.assert_allclose(jax.jit(jax.vmap(rate))(steps), [rate(int(step)) for step in steps], rtol=1e-6)


@pytest.mark.parametrize(
    ("length", "whole", "expected"), [(1, 100, 1), (1.0, 100, 100), (0, 9, 0), (0.0, 9, 0), (0.5, 9, 4), (30, 9, 30)]
)
def test_an_int_is_steps_and_a_float_a_fraction_rounded_down(length, whole, expected):
    assert num_steps(length, whole) == expected
