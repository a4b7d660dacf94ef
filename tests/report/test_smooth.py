"""Trend and visible range: noise, spikes and large first values do not hide the curve."""

import numpy as np
import pytest

from lmtrain.report.curve import is_noisy, smooth, thin, visible_range

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


@pytest.mark.parametrize("number", [1, 2, 3, 7])
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


def test_a_constant_and_an_empty_curve_have_a_range():
    low, high = visible_range([curve(np.full(30, 7.0), STEPS[:30])])
    assert low < 7 < high
    assert visible_range([curve([np.nan], [1])]) == (0, 1)
