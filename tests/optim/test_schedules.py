"""Rates of each schedule, compared with the reference, and their plot."""

import matplotlib.image
import numpy as np
import pytest

from lmtrain.optim.config import AdamConfig
from lmtrain.optim.schedules import build_schedule, plot_learning_rate

COSINE = {0: 0, 1: 0.1, 5: 0.5, 10: 1, 11: 0.999726, 50: 0.628142, 55: 0.55, 60: 0.471858, 80: 0.20528, 99: 0.100274}
TABLE = [
    ("cosine", {"warmup": 0.1}, COSINE | {100: 0.1, 10_000: 0.1}),
    ("linear", {"warmup": 10}, {10: 1, 11: 0.99, 50: 0.6, 99: 0.11, 100: 0.1}),
    ("linear", {"warmup": 10, "decay": 0.2}, {5: 0.5, 79: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 10_000: 0.1}),
    ("constant", {"warmup": 0.1, "decay": 0.5}, {0: 0, 5: 0.5, 10: 1, 55: 1, 99: 1}),
    ("linear", {"warmup": 0}, {0: 1, 50: 0.55, 100: 0.1}),
    ("wsd", {"warmup": 10}, {5: 0.5, 79: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 10_000: 0.1}),
    ("wsd", {"warmup": 10, "decay": 50}, {49: 1, 50: 1, 75: 0.55, 100: 0.1}),
    ("linear", {"warmup": 1}, {0: 0, 1: 1, 100: 0.1}),
    ("linear", {"warmup": 1.0}, {0: 0, 1: 0.01, 50: 0.5, 99: 0.99}),
    ("inv", {"warmup": 10}, {10: 0.909091, 11: 0.909091, 50: 0.2, 99: 0.10101}),
    ("linear", {"cycles": 2, "warmup": 0.1}, {5: 1, 10: 0.9, 49: 0.12, 50: 1, 51: 0.982, 75: 0.55, 99: 0.118}),
    (
        "linear",
        {"cycles": 2, "warmup": 0.1, "rewarmup": 0.1},
        {49: 0.12, 50: 0.1, 51: 0.28, 52: 0.46, 55: 1, 56: 0.98, 75: 0.6, 99: 0.12},
    ),
    ("linear", {"warmup": 0, "cycles": 3}, {33: 1, 34: 0.972727, 66: 1, 67: 0.973529, 99: 0.126471}),
    ("linear", {"warmup": 0, "cycles": [30, 60]}, {15: 0.55, 29: 0.13, 30: 1, 59: 0.13, 60: 1, 99: 0.1225}),
    ("linear", {"warmup": 0, "cycle_length": 25}, {24: 0.136, 25: 1, 99: 0.136}),
    ("linear", {"warmup": 0, "cycle_length": 30}, {89: 0.3475, 90: 0.325, 99: 0.1225}),
    ("linear", {"warmup": 0, "cycle_length": [20, 30]}, {19: 0.145, 20: 1, 49: 0.13, 50: 1, 99: 0.118}),
    (
        "cosine",
        {"cycles": 2, "warmup": 0.1, "decay": 0.5},
        {10: 1, 25: 1, 26: 0.996452, 49: 0.103548, 50: 1, 75: 1, 76: 0.996452, 99: 0.103548},
    ),
    ("constant", {"cycles": 2, "rewarmup": 0.1, "warmup": 0.1}, {0: 0, 5: 1, 30: 1, 50: 1, 52: 1, 99: 1}),
]
# the decay after a stable phase has the same shape as without one
STABLE = [
    ("inv", {"warmup": 10, "decay": 12}, {10: 1, 50: 1, 87: 1, 88: 12 / 21, 89: 12 / 21, 94: 12 / 66, 99: 12 / 111}),
    ("inv", {"warmup": 10, "decay": 12, "cycles": 2}, {10: 1, 37: 1, 39: 12 / 21, 50: 1, 87: 1, 99: 12 / 111}),
]
LONG = {500: 0.5, 1000: 1, 9000: 1, 20_000: 0.707107, 100_000: 0.316228, 500_000: 0.141421, 999_999: 0.1}


def schedule(shape: str, settings: dict, steps: int = 100):
    return build_schedule(AdamConfig(learning_rate=1.0, min_lr_ratio=0.1, lr_schedule=shape, **settings), steps)


@pytest.mark.parametrize(("shape", "settings", "expected"), [*TABLE, *STABLE])
def test_rates_are_equal_to_the_reference(shape, settings, expected):
    rate = schedule(shape, settings)
    assert {step: float(rate(step)) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_inverse_square_root_stays_at_the_peak_for_ten_thousand_steps():
    rate = schedule("inv_sqrt", {"warmup": 1000}, 1_000_000)
    assert {step: float(rate(step)) for step in LONG} == pytest.approx(LONG, abs=1e-6)


def test_inverse_square_root_with_a_long_warmup_stays_at_the_peak_until_its_decay():
    rate = schedule("inv_sqrt", {"warmup": 20_000, "decay": 50_000}, 100_000)
    expected = {20_000: 1, 49_999: 1, 50_000: 0.5**0.5, 70_000: 0.5, 99_999: (10_000 / 69_999) ** 0.5}
    assert {step: float(rate(step)) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_rates_scale_with_the_peak_and_the_end_may_be_zero():
    rate = build_schedule(AdamConfig(learning_rate=3e-4, min_lr_ratio=0, lr_schedule="linear", warmup=0), 100)
    assert [float(rate(step)) for step in (0, 50, 100)] == pytest.approx([3e-4, 1.5e-4, 0])


def test_after_a_decay_to_zero_a_rewarmup_starts_at_zero():
    rate = build_schedule(AdamConfig(min_lr_ratio=0, learning_rate=1.0, cycles=2, warmup=0, rewarmup=10), 100)
    assert [float(rate(step)) for step in (49, 50, 55, 60)] == pytest.approx([0.000987, 0, 0.5, 1], abs=1e-6)


def test_rates_are_exact_after_two_billion_steps():
    rate = build_schedule(AdamConfig(learning_rate=1.0, warmup=0, decay=10, lr_schedule="linear"), 2**31 - 1)
    assert [float(rate(2**31 - 1 - n)) for n in (10, 5, 0)] == pytest.approx([1, 0.55, 0.1])


def test_the_rate_is_drawn_over_all_steps(tmp_path):
    plot_learning_rate(AdamConfig(), 20_000, str(tmp_path / "rate.png"))
    picture = matplotlib.image.imread(tmp_path / "rate.png")[..., :3]
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 1
