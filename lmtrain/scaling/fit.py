"""The law of a ladder, and its fit to losses, with intervals.

The sum of Huber losses of log(law) - log(loss) is minimized, as Hoffmann et al. 2022 do, with a threshold of 0.001.
Starts are from a grid over alpha and beta, at which E, A and B are linear and have a solution of non-negative least
squares (variable projection). From the best of them Levenberg and Marquardt's method converges quadratically where
L-BFGS stops early (Besiroglu et al. 2024 on the published fit); Huber's losses are squares with weights, updated in
each iteration.

Intervals are those of laws fitted to 1,000 samples of the losses around the fitted law, with the noise of seeds and of
what the law does not describe, each time with another draw of its unknown size: with few runs, intervals are as wide as
Student's. All samples are fitted at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Law:
    """A law. `E` is the loss that no size and no data falls below, in nats per token."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a model of N parameters after D tokens."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def share(self) -> float:
        """The exponent with which the best N grows with the compute: beta / (alpha + beta)."""
        return self.beta / (self.alpha + self.beta)

    def best(self, product: float) -> tuple[float, float]:
        """N and D with the lowest loss at a given N * D.

        With D = C / N the derivative of the loss is zero where alpha * A / N^alpha = beta * B / D^beta.
        """
        parameters = (self.alpha * self.A / (self.beta * self.B)) ** (
            1 / (self.alpha + self.beta)
        ) * product**self.share
        return parameters, product / parameters

    def flat_range(self, product: float, tolerance: float = 1e-3) -> tuple[float, float]:
        """The smallest and the largest N whose loss at this N * D is above the lowest by at most this fraction."""
        best, tokens = self.best(product)
        limit = (1 + tolerance) * self.loss(best, tokens)
        return best * self._step(best, product, limit, -1), best * self._step(best, product, limit, 1)

    def _step(self, best: float, product: float, limit: float, sign: int) -> float:
        """The factor on `best` at which the loss reaches the limit, by bisection of its logarithm."""
        low, high = 0.0, 40.0
        for _ in range(80):
            middle = (low + high) / 2
            parameters = best * math.exp(sign * middle)
            low, high = (middle, high) if self.loss(parameters, product / parameters) < limit else (low, middle)
        return math.exp(sign * low)


class Interval(NamedTuple):
    """An interval of 95 %."""

    low: float
    high: float

    @classmethod
    def of(cls, samples: np.ndarray) -> "Interval":
        return cls(*(float(value) for value in np.quantile(samples, [0.025, 0.975])))

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Many laws, as arrays: the laws fitted to samples of the losses. `noise` has a factor on the loss for each, of a
    single run."""

    E: np.ndarray
    A: np.ndarray
    alpha: np.ndarray
    B: np.ndarray
    beta: np.ndarray
    noise: np.ndarray

    def losses(self, parameters: float, tokens: float) -> np.ndarray:
        """The loss by each law."""
        found: np.ndarray = self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta
        return found

    def best_size(self, product: float) -> Interval:
        """The interval of the N with the lowest loss at a given N * D."""
        total = self.alpha + self.beta
        logs = (np.log(self.alpha / self.beta * self.A / self.B) + self.beta * math.log(product)) / total
        return Interval.of(np.exp(logs))

    def interval(self, parameters: float, tokens: float) -> Interval:
        """The interval in which the loss of a single run is."""
        return Interval.of(self.losses(parameters, tokens) * self.noise)


HUBER = 1e-3
SAMPLES = 1000
UNKNOWNS = ("E", "A", "alpha", "B", "beta")
NUM_UNKNOWN = len(UNKNOWNS)

_EXPONENTS = np.linspace(0.05, 1.5, 30)
_BOUNDS = (0.01, 3.0)  # of exponents
_LEAST = 1e-3  # E, and the terms of N and D, of the smallest loss: their logs have no bound, and these are as good as 0
_STARTS = 24
_ITERATIONS = 300


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law, with the laws of samples. `residuals` are log(law) - log(loss), `noise` their standard deviation in
    a single run, and `degrees` its degrees of freedom. `at_bounds` are the unknowns whose values are a bound, with it:
    their intervals say little."""

    law: Law
    laws: Laws
    residuals: np.ndarray
    noise: float
    degrees: int
    at_bounds: Mapping[str, float]

    def interval(self, name: str) -> Interval:
        """The interval of `E`, `A`, `alpha`, `B` or `beta`."""
        return Interval.of(getattr(self.laws, name))

    @property
    def unidentified(self) -> list[str]:
        """What these runs do not determine: unknowns at a bound, exponents whose interval spans a factor of 3, and E if
        it may be 0."""
        found = set(self.at_bounds)
        found |= {name for name in ("alpha", "beta") if self.interval(name).high > 3 * self.interval(name).low}
        found |= {exponent for factor, exponent in (("A", "alpha"), ("B", "beta")) if factor in self.at_bounds}
        low, high = self.interval("E")
        return [name for name in UNKNOWNS if name in found or (name == "E" and low < 0.2 * high)]


def fit_law(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float], seed: int = 0) -> Fit:
    """Fit the law to at least six losses of runs with N parameters and D tokens. `seed` is that of the samples."""
    n, d, y = (np.asarray(values, np.float64) for values in (parameters, tokens, losses))
    problem = _Problem(n, d)
    starts = problem.starts(y)
    found, costs = problem.minimize(starts, np.broadcast_to(np.log(y), (len(starts), len(y))))
    best = found[np.argmin(costs)]
    residuals = problem.logs(best[None])[0] - np.log(y)
    noise = _noise(residuals, n, d)
    rng = np.random.default_rng(seed)
    size = np.sqrt(noise.degrees / rng.chisquare(noise.degrees, SAMPLES))
    errors = rng.standard_normal((SAMPLES, len(noise.of_points)))[:, noise.point]
    samples = problem.logs(best[None]) + size[:, None] * noise.of_points[noise.point] * errors
    laws, _ = problem.minimize(np.broadcast_to(best, (SAMPLES, NUM_UNKNOWN)), samples)
    factors = np.exp(noise.of_run * size * rng.standard_normal(SAMPLES))
    numbers = zip(("E", "A", "alpha", "B", "beta"), problem.unscale(best[None]), strict=True)
    law = Law(**{name: float(values[0]) for name, values in numbers})
    E, A, alpha, B, beta = problem.unscale(laws)
    laws_of_samples = Laws(E=E, A=A, alpha=alpha, B=B, beta=beta, noise=factors)
    return Fit(
        law=law,
        laws=laws_of_samples,
        residuals=residuals,
        noise=noise.of_run,
        degrees=noise.degrees,
        at_bounds=_at_bounds(law, n, d, y),
    )


def _at_bounds(law: Law, n: np.ndarray, d: np.ndarray, losses: np.ndarray) -> dict[str, float]:
    """The unknowns at a bound, and the bound."""
    least = 2 * _LEAST * losses.min()
    terms = {"E": law.E, "A": law.A / n.min() ** law.alpha, "B": law.B / d.min() ** law.beta}
    found = {name: 0.0 for name, largest in terms.items() if largest <= least}
    exponents = {"alpha": law.alpha, "beta": law.beta}
    return found | {
        name: bound
        for name, value in exponents.items()
        for bound in _BOUNDS
        if math.isclose(value, bound, rel_tol=1e-6)
    }


class _Noise(NamedTuple):
    """Standard deviations of log losses: of a single run, and of the mean of the seeds at each point.

    `point` is the point of each run, and `degrees` are the degrees of freedom of the estimate.
    """

    of_run: float
    of_points: np.ndarray
    point: np.ndarray
    degrees: int


def _noise(residuals: np.ndarray, n: np.ndarray, d: np.ndarray) -> _Noise:
    """The noise of seeds, from runs that differ in nothing else, and what the law does not describe at a point, which
    its seeds share: more seeds do not make it smaller."""
    _, point = np.unique(np.stack([n, d]), axis=1, return_inverse=True)
    point = point.ravel()
    runs = np.bincount(point)
    means = np.bincount(point, residuals) / runs
    of_seeds, of_points = len(residuals) - len(runs), max(len(runs) - NUM_UNKNOWN, 1)
    seeds = float(np.sum((residuals - means[point]) ** 2)) / of_seeds if of_seeds else 0.0
    shared = float(np.sum(means**2)) / of_points - seeds * float(np.mean(1 / runs))
    degrees = of_points if shared > 0 else of_seeds
    shared = max(shared, 0.0)
    return _Noise((shared + seeds) ** 0.5, np.sqrt(shared + seeds / runs), point, max(degrees, 1))


class _Problem:
    """The fit at given N and D. Unknowns are log E, log A', alpha, log B', beta, of A' / (N / N0)^alpha with N0 the
    geometric mean, which makes them nearly independent. All arrays begin with a dimension of independent fits."""

    def __init__(self, n: np.ndarray, d: np.ndarray):
        self.center = np.log(n).mean(), np.log(d).mean()
        self.x, self.y = np.log(n) - self.center[0], np.log(d) - self.center[1]

    def unscale(self, unknowns: np.ndarray) -> tuple[np.ndarray, ...]:
        """E, A, alpha, B, beta."""
        e, a, alpha, b, beta = unknowns.T
        return np.exp(e), np.exp(a + alpha * self.center[0]), alpha, np.exp(b + beta * self.center[1]), beta

    def terms(self, unknowns: np.ndarray) -> np.ndarray:
        """Logs of the three terms of the law [fits, 3, runs]."""
        e, a, alpha, b, beta = unknowns.T[:, :, None]
        return np.stack([np.broadcast_to(e, (len(e), len(self.x))), a - alpha * self.x, b - beta * self.y], axis=1)

    def logs(self, unknowns: np.ndarray) -> np.ndarray:
        """Logs of the losses by the law [fits, runs]."""
        found: np.ndarray = np.logaddexp.reduce(self.terms(unknowns), axis=1)
        return found

    def starts(self, losses: np.ndarray) -> np.ndarray:
        """The best points of a grid over the exponents, at which the other unknowns are solved for."""
        grid = [(alpha, beta) for alpha in _EXPONENTS for beta in _EXPONENTS]
        rows = [self._linear(alpha, beta, losses) for alpha, beta in grid]
        rows.sort(key=lambda row: row[0])
        return np.stack([unknowns for _, unknowns in rows[:_STARTS]])

    def _linear(self, alpha: float, beta: float, losses: np.ndarray) -> tuple[float, np.ndarray]:
        """The sum of squares and the unknowns of non-negative least squares, by trying which terms are zero."""
        columns = np.stack([np.ones_like(self.x), np.exp(-alpha * self.x), np.exp(-beta * self.y)], axis=1)
        best = (np.inf, np.zeros(3))
        for size in (3, 2, 1):
            for kept in map(list, combinations(range(3), size)):
                solution = np.zeros(3)
                solution[kept] = np.linalg.lstsq(columns[:, kept], losses, rcond=None)[0]
                cost = float(np.sum((columns @ solution - losses) ** 2))
                if (solution >= 0).all() and cost < best[0]:
                    best = cost, solution
            if best[0] < np.inf:
                break  # terms that are zero without need only add to the cost
        smallest = _LEAST * losses.min()
        e, a, b = np.log(np.maximum(best[1], smallest))
        return best[0], np.array([e, a, alpha, b, beta])

    def minimize(self, unknowns: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Minimize from each start [fits, 5] for its logs of losses [fits, runs]. -> unknowns, costs [fits]"""
        unknowns, costs = np.array(unknowns), self._costs(unknowns, logs)
        damping = np.full(len(unknowns), 1e-3)
        active = np.arange(len(unknowns))
        for _ in range(_ITERATIONS):
            now, target = unknowns[active], logs[active]
            residuals, slopes = self.logs(now) - target, self._slopes(now)
            weighted = slopes * np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-300))[:, :, None]
            gradient = (weighted.transpose(0, 2, 1) @ residuals[:, :, None])[:, :, 0]
            curvature = weighted.transpose(0, 2, 1) @ slopes
            diagonal = np.einsum("fii->fi", curvature)
            damped = curvature + np.eye(NUM_UNKNOWN) * (damping[active, None] * diagonal + 1e-14)[:, :, None]
            tried = now - np.linalg.solve(damped, gradient[:, :, None])[:, :, 0]
            tried[:, [2, 4]] = np.clip(tried[:, [2, 4]], *_BOUNDS)
            before, after = costs[active], self._costs(tried, target)
            better = after < before
            unknowns[active] = np.where(better[:, None], tried, now)
            costs[active] = np.where(better, after, before)
            damping[active] = np.where(better, damping[active] / 4, damping[active] * 8)
            converged = np.where(better, before - after <= 1e-11 * before, damping[active] > 1e6)
            active = active[~converged]
            if not len(active):
                break
        return unknowns, costs

    def _costs(self, unknowns: np.ndarray, logs: np.ndarray) -> np.ndarray:
        """Sums of Huber's losses."""
        size = np.abs(self.logs(unknowns) - logs)
        found: np.ndarray = np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)).sum(axis=1)
        return found

    def _slopes(self, unknowns: np.ndarray) -> np.ndarray:
        """Derivatives of the logs of losses by the unknowns [fits, runs, 5]."""
        terms = self.terms(unknowns)
        e, a, b = np.moveaxis(np.exp(terms - np.logaddexp.reduce(terms, axis=1)[:, None]), 1, 0)
        return np.stack([e, a, -a * self.x, b, -b * self.y], axis=2)
