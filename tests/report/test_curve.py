"""Curves: thinning, trend and visible range."""

import math

import numpy as np
import pytest

from lmtrain.report.curve import MAX_BLOCKS, is_noisy, smooth, thin, visible_range


def test_a_short_run_keeps_all_values():
    steps, values = list(range(1, 1500)), [math.sin(step) for step in range(1, 1500)]
    curve = thin(steps, values)
    for kept_steps, kept in ((curve.steps, curve.values), (curve.mean_steps, curve.means)):
        assert kept_steps.tolist() == steps
        assert kept.tolist() == values
    assert (curve.last_step, curve.last, curve.bad) == (1499, values[-1], 0)
    assert curve.sum == pytest.approx(sum(values))
    assert curve.median == float(np.median(values))


def test_a_long_run_keeps_the_extremes_and_means_of_blocks():
    steps = np.arange(1, 100_001)
    values = np.cos(steps * 0.7) + steps / 1e5
    values[70_000], values[1234] = 50.0, -40.0
    curve = thin(steps, values)
    assert curve.highest == (70_001, 50.0)
    assert curve.lowest == (1235, -40.0)
    width = 64  # the smallest power of two that cuts 100,000 steps into at most 2048 blocks
    assert len(curve.steps) <= 2 * MAX_BLOCKS
    assert len(curve.means) == 100_000 // width + 1
    assert curve.means[5] == pytest.approx(values[5 * width - 1 : 6 * width - 1].mean())
    assert curve.mean_steps[5] == pytest.approx(5.5 * width - 0.5)
    for block in (0, 700, 1093):
        within = (steps // width) == block
        drawn = (curve.steps // width) == block
        assert {*curve.values[drawn]} == {values[within].min(), values[within].max()}
    assert (np.diff(curve.steps) > 0).all()
    assert np.isin(curve.values, values).all()  # only measured values


def test_nan_and_infinity_are_counted_and_leave_gaps():
    curve = thin([1, 2, 3, 4], [1.0, math.nan, math.inf, 4.0])
    assert (curve.bad, curve.bad_steps.tolist()) == (2, [2, 3])
    assert np.isnan(curve.values).tolist() == np.isnan(curve.means).tolist() == [False, True, True, False]
    assert (curve.sum, curve.last) == (5.0, 4.0)
    long = thin(range(10_000), [math.nan if step in (5000, 9999) else 1.0 for step in range(10_000)])
    assert long.bad == 2
    assert np.isfinite(long.values).all()
    assert math.isnan(long.last)


STEPS = np.arange(1, 2001)
TREND = 3 + 8 * np.exp(-STEPS / 40)
NOISE = np.random.default_rng(0).normal(0, 0.1, len(STEPS))


def curve(values, steps=STEPS):
    return thin(list(steps), list(values))


def test_a_smoothed_curve_follows_the_trend_from_the_first_step_to_the_last():
    steps, values = smooth(curve(TREND + NOISE))
    assert steps.tolist() == STEPS.tolist()
    assert np.abs(values - TREND)[400:].max() < 0.08
    assert np.abs(values / TREND - 1).max() < 0.06  # the steep fall is not late
    assert values[0] == pytest.approx(TREND[0] + NOISE[0])


def test_a_single_spike_has_no_effect():
    spiked = TREND + NOISE
    spiked[1000] = 1e6
    assert np.abs(smooth(curve(spiked))[1] - smooth(curve(TREND + NOISE))[1]).max() < 0.03


@pytest.mark.parametrize("number", [1, 3, 7])
def test_few_points_can_be_smoothed(number):
    assert len(smooth(curve(TREND[:number], STEPS[:number]))[1]) == number
    assert len(smooth(curve([np.nan], [1]))[1]) == 0


def test_noise_is_variation_between_neighbours():
    assert is_noisy(curve(TREND + NOISE))
    assert not is_noisy(curve(TREND))
    assert not is_noisy(curve((TREND + NOISE)[:50], STEPS[:50]))
    assert not is_noisy(curve(np.full(2000, 7.0)))


def test_large_first_values_and_spikes_do_not_hide_the_rest():
    values = TREND + NOISE
    values[:20] += 100
    values[1500] = 1e5
    low, high = visible_range([curve(values)])
    assert 2.5 < low < 3
    assert 5 < high < 12


def test_a_range_contains_all_close_values_and_all_of_few_points():
    ramp = np.linspace(0, 1, 2000)
    assert visible_range([curve(ramp)]) == (0, 1)
    assert visible_range([curve([1.0, 100.0], [1, 2])]) == (1, 100)
    assert visible_range([curve(ramp), curve(ramp + 5)]) == (0, 6)
    low, high = visible_range([curve(np.full(30, 7.0), STEPS[:30])])
    assert low < 7 < high
    assert visible_range([curve([np.nan], [1])]) == (0, 1)
