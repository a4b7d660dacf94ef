"""Rates of each schedule, compared with the reference, and their plot."""

import pytest

from lmtrain.optim.config import AdamConfig
from lmtrain.optim.schedules import build_schedule, plot_learning_rate

COSINE = {0: 0, 1: 0.1, 5: 0.5, 10: 1, 11: 0.999726, 50: 0.628142, 55: 0.55, 60: 0.471858, 80: 0.20528, 99: 0.100274}
TABLE = [
    ("cosine", {"warmup": 0.1}, COSINE | {100: 0.1, 10_000: 0.1}),
    ("linear", {"warmup": 10}, {10: 1, 11: 0.99, 50: 0.6, 99: 0.11, 100: 0.1}),
    ("linear", {"warmup": 10, "decay": 0.2}, {5: 0.5, 79: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 10_000: 0.1}),
    ("constant", {"warmup": 0.1, "decay": 0.5}, {0: 0, 5: 0.5, 10: 1, 55: 1, 99: 1}),
    ("wsd", {"warmup": 10}, {5: 0.5, 79: 1, 80: 1, 81: 0.955, 90: 0.55, 99: 0.145, 10_000: 0.1}),
    ("linear", {"warmup": 1.0}, {0: 0, 1: 0.01, 50: 0.5, 99: 0.99}),
    ("inv", {"warmup": 10}, {10: 0.909091, 11: 0.909091, 50: 0.2, 99: 0.10101}),
    ("linear", {"cycles": 2, "warmup": 0.1}, {5: 1, 10: 0.9, 49: 0.12, 50: 1, 51: 0.982, 75: 0.55, 99: 0.118}),
    (
        "linear",
        {"cycles": 2, "warmup": 0.1, "rewarmup": 0.1},
        {49: 0.12, 50: 0.1, 51: 0.28, 52: 0.46, 55: 1, 56: 0.98, 75: 0.6, 99: 0.12},
    ),
    ("linear", {"warmup": 0, "cycles": [30, 60]}, {15: 0.55, 29: 0.13, 30: 1, 59: 0.13, 60: 1, 99: 0.1225}),
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


# of other lengths, peaks and ends
OTHERS = [
    ("inv_sqrt", {"warmup": 1000}, 1_000_000,
     {500: 0.5, 1000: 1, 9000: 1, 20_000: 0.707107, 100_000: 0.316228, 500_000: 0.141421, 999_999: 0.1}),
    ("inv_sqrt", {"warmup": 20_000, "decay": 50_000}, 100_000,
     {20_000: 1, 49_999: 1, 50_000: 0.5**0.5, 70_000: 0.5, 99_999: (10_000 / 69_999) ** 0.5}),
    ("linear", {"learning_rate": 3e-4, "min_lr_ratio": 0, "warmup": 0}, 100, {0: 3e-4, 50: 1.5e-4, 100: 0}),
    ("cosine", {"min_lr_ratio": 0, "cycles": 2, "warmup": 0, "rewarmup": 10}, 100,
     {49: 0.000987, 50: 0, 55: 0.5, 60: 1}),
    ("linear", {"warmup": 0, "decay": 10}, 2**31 - 1, {2**31 - 11: 1, 2**31 - 6: 0.55, 2**31 - 1: 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "settings", "steps", "expected"),
    [*((shape, settings, 100, expected) for shape, settings, expected in (*TABLE, *STABLE)), *OTHERS],
)
def test_rates_are_equal_to_the_reference(shape, settings, steps, expected):
    config = AdamConfig(**{"learning_rate": 1.0, "min_lr_ratio": 0.1, "lr_schedule": shape, **settings})
    rate = build_schedule(config, steps)
    assert {step: float(rate(step)) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_the_rate_is_drawn_over_all_steps(tmp_path):
    plot_learning_rate(AdamConfig(), 20_000, str(tmp_path / "rate.png"))
    assert (tmp_path / "rate.png").stat().st_size > 1000
