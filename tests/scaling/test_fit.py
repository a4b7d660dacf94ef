"""The fit recovers known laws, and its intervals cover them."""

import numpy as np
import pytest

from lmtrain.scaling.fit import Interval, Law, fit_law

LAW = Law(E=1.7, A=400.0, alpha=0.34, B=410.0, beta=0.28)
RUNS = [(n, n * ratio) for n in np.geomspace(20e6, 300e6, 5) for ratio in (5, 10, 20, 40)]
N, D = (np.array(values) for values in zip(*RUNS, strict=True))
LOSSES = np.array([LAW.loss(n, d) for n, d in RUNS])
LARGE = (7e9, 140e9)  # 20 times the largest N
UNKNOWNS = ("E", "A", "alpha", "B", "beta")


def noisy(noise, seed):
    return LOSSES * np.exp(noise * np.random.default_rng(seed).standard_normal(len(LOSSES)))


def test_a_law_without_noise_is_recovered():
    fit = fit_law(N, D, LOSSES)
    for name in UNKNOWNS:
        assert getattr(fit.law, name) == pytest.approx(getattr(LAW, name), rel=1e-9)
    assert fit.law.loss(*LARGE) == pytest.approx(LAW.loss(*LARGE), rel=1e-6)
    assert fit.unidentified == []


@pytest.mark.parametrize(
    "law",
    [
        Law(E=0.9, A=50, alpha=0.6, B=2e3, beta=0.4),
        Law(E=2.5, A=2e3, alpha=0.45, B=30, beta=0.15),
        Law(E=1e-3, A=20, alpha=0.1, B=60, beta=0.2),
    ],
)
def test_other_laws_are_recovered(law):
    fit = fit_law(N, D, [law.loss(n, d) for n, d in RUNS])
    assert fit.law.loss(*LARGE) == pytest.approx(law.loss(*LARGE), rel=1e-6)


def test_predictions_from_noisy_runs_are_close():
    errors = [fit_law(N, D, noisy(1e-3, seed)).law.loss(*LARGE) / LAW.loss(*LARGE) - 1 for seed in range(8)]
    assert max(map(abs, errors)) < 0.02


@pytest.mark.long
def test_intervals_cover_the_law():
    """Of 100 repetitions, each interval of 95 % covers its value in at least 90; also for the loss of a new run."""
    covered = dict.fromkeys((*UNKNOWNS, "loss", "run"), 0)
    for seed in range(100):
        fit = fit_law(N, D, noisy(1e-3, seed), seed)
        for name in UNKNOWNS:
            covered[name] += getattr(LAW, name) in fit.interval(name)
        covered["loss"] += LAW.loss(*LARGE) in Interval.of(fit.laws.losses(*LARGE))
        new = LAW.loss(*LARGE) * np.exp(1e-3 * np.random.default_rng(1000 + seed).standard_normal())
        covered["run"] += new in fit.laws.interval(*LARGE)
    print(covered)
    assert min(covered.values()) >= 90


def test_an_outlier_has_little_weight():
    losses = LOSSES.copy()
    losses[7] *= 1.05
    assert fit_law(N, D, losses).law.loss(*LARGE) == pytest.approx(LAW.loss(*LARGE), rel=0.005)


def test_what_the_runs_do_not_determine_is_named():
    near = [(n, n * ratio) for n in (20e6, 22e6, 24e6) for ratio in (10, 12)]
    rng = np.random.default_rng(0)
    losses = [LAW.loss(n, d) * np.exp(1e-3 * rng.standard_normal()) for n, d in near]
    fit = fit_law(*zip(*near, strict=True), losses)
    assert {"alpha", "beta"} <= set(fit.unidentified)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda n, d: 40 / n**0.34 + 41 / d**0.28 - 0.05, {"E": 0}),
        (lambda n, d: 2 + 1e-10 * n + 410 / d**0.28, {"A": 0, "alpha": 0.01}),
        (lambda n, d: 1.7 + 400 / n**0.34, {"B": 0}),
        (lambda n, d: 3.0, {"A": 0, "B": 0}),
        (lambda n, d: 1.7 + 400 / n**0.34 + 410 / d**0.28, {}),
    ],
)
def test_values_at_a_bound_are_not_identified(loss, expected):
    """A loss below what E = 0 allows, one that rises with N, or that does not depend on D."""
    noise = np.exp(1e-4 * np.random.default_rng(0).standard_normal(len(RUNS)))
    fit = fit_law(N, D, noise * [loss(n, d) for n, d in RUNS])
    assert expected.items() <= fit.at_bounds.items()
    assert bool(fit.at_bounds) == bool(expected)
    assert set(fit.at_bounds) <= set(fit.unidentified)
    if "B" in expected:
        assert "beta" in fit.unidentified


def test_the_interval_of_the_best_size_covers_it():
    fit = fit_law(N, D, noisy(1e-3, 0))
    best, interval = LAW.best(1e20)[0], fit.laws.best_size(1e20)
    assert best in interval
    assert interval.high < 2 * interval.low


def test_noise_of_seeds_widens_intervals():
    """Seeds that differ more than the residuals of their means."""
    n, d, losses = np.repeat(N, 2), np.repeat(D, 2), np.repeat(LOSSES, 2)
    losses = losses * np.exp(0.01 * np.tile([1, -1], len(LOSSES)))
    fit = fit_law(n, d, losses)
    assert fit.noise > 0.0099
    assert fit.interval("alpha").high > LAW.alpha


def test_seeds_do_not_average_out_what_the_law_does_not_describe():
    """Two seeds of each point that have nearly the same loss are no more certain than one."""
    losses = noisy(3e-3, 0)
    rng = np.random.default_rng(1)
    twice = np.repeat(losses, 2) * np.exp(1e-5 * rng.standard_normal(2 * len(losses)))
    one, two = fit_law(N, D, losses), fit_law(np.repeat(N, 2), np.repeat(D, 2), twice)
    assert (two.degrees, one.degrees) == (len(N) - 5, len(N) - 5)
    assert two.noise == pytest.approx(one.noise, rel=0.05)
    widths = [fit.laws.interval(*LARGE).high - fit.laws.interval(*LARGE).low for fit in (one, two)]
    assert widths[1] == pytest.approx(widths[0], rel=0.1)


def test_the_best_size_has_the_lowest_loss_of_its_compute():
    product = 1e20
    best, tokens = LAW.best(product)
    assert best * tokens == pytest.approx(product)
    lowest = LAW.loss(best, tokens)
    for factor in (0.9, 1.1):
        assert LAW.loss(best * factor, tokens / factor) > lowest
    for end in LAW.flat_range(product):
        assert LAW.loss(end, product / end) == pytest.approx(1.001 * lowest, rel=1e-6)
