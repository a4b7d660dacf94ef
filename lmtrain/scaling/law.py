"""The law of a loss: L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022), N parameters and D tokens."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
