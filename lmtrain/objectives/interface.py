"""The interface of objectives: the training step and Sophia's Hessian use only this."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lmtrain.models.interface import Outputs


class LossTerms(NamedTuple):
    """The sum of losses times weights, a float32 scalar; and sums of other values by name, whose means are logged."""

    total: jax.Array
    logged: dict[str, jax.Array]


class Objective(Protocol):
    """A weighted mean over the positions of a batch, or over its pairs of answers (see `lmtrain/data/batches.py`).

    The step divides the sum over all microbatches and devices by the sum of the weights, so the loss does not depend
    on how a batch is split.
    """

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """The weight of each position in the mean, [B, S], float32, or bool for weights of 0 and 1; or of each pair."""

    def loss_sum(self, outputs: Outputs, batch: Mapping[str, jax.Array]) -> LossTerms:
        """The sum over all positions of loss times weight. `sum_of_losses` computes such sums without the logits of the
        entire batch."""


def sum_of_weights(objective: Objective, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The divisor that turns sums over a batch into means, float32; 1 if all weights are 0."""
    total = objective.weights(batch).sum().astype(jnp.float32)
    return jnp.where(total > 0, total, 1.0)
