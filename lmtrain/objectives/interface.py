"""The interface of objectives: the training step and Sophia's Hessian use only this."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lmtrain.models.base_config import Coefficient
from lmtrain.models.interface import Outputs
from lmtrain.models.params import Auxiliary


class LossTerms(NamedTuple):
    """The sum of losses times weights, a float32 scalar; and sums of other values by name, whose means are logged."""

    total: jax.Array
    logged: dict[str, jax.Array]


class Loss(Protocol):
    """A weighted mean over the positions of a batch, or over its pairs of answers (see `lmtrain/data/batches.py`).

    The step divides the sum over all microbatches and devices by the sum of the weights, so the loss does not depend
    on how a batch is split.
    """

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """The weight of each position in the mean, [B, S], float32, or bool for weights of 0 and 1; or of each pair."""

    def loss_sum(self, outputs: Outputs, batch: Mapping[str, jax.Array]) -> LossTerms:
        """The sum over all positions of loss times weight. `sum_of_losses` computes such sums without the logits of the
        entire batch."""


class Weighted(NamedTuple):
    """A loss, and the coefficient of its mean."""

    loss: Loss
    coefficient: Coefficient = 1.0

    def coefficient_at(self, step: jax.Array) -> jax.Array:
        """The coefficient in an update, float32."""
        if not isinstance(self.coefficient, tuple):
            return jnp.float32(self.coefficient)
        value = jnp.float32(0)
        for begin, own in self.coefficient:
            value = jnp.where(step >= begin, own, value)
        return value


# The losses that a run minimizes the sum of, by the name under which they are logged, `train/<name>`. `LOSS` is the
# main one, with coefficient 1.
Objective = Mapping[str, Weighted]
LOSS = "loss"


def main_loss(objective: Objective) -> Loss:
    """The loss that evaluation and estimates of the Hessian use."""
    return objective[LOSS].loss


def further_sums(objective: Objective, outputs: Outputs, batch: Mapping[str, jax.Array]) -> dict[str, Auxiliary]:
    """The sums of the losses besides the main one, by the name of their metric, without their coefficients. What they
    log is not logged."""
    found = {}
    for name, (loss, _) in objective.items():
        if name != LOSS:
            weight = jax.lax.stop_gradient(loss.weights(batch).sum().astype(jnp.float32))
            found[f"train/{name}"] = Auxiliary(loss.loss_sum(outputs, batch).total, weight, 1.0)
    return found


def sum_of_weights(loss: Loss, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The divisor that turns sums over a batch into means, float32; 1 if all weights are 0."""
    total = loss.weights(batch).sum().astype(jnp.float32)
    return jnp.where(total > 0, total, 1.0)
