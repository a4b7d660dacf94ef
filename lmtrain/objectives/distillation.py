"""Distillation from a frozen teacher with the same vocabulary (Hinton et al. 2015):

    loss = alpha * T^2 * KL(p || q) + (1 - alpha) * cross-entropy

p and q are the softmax of the teacher's and of the student's logits divided by the temperature T. The factor T^2 keeps
the size of the gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.interface import MAIN, Head, LogitCap, Outputs
from lmtrain.objectives.chunked_sums import Chunk, sum_of_losses, weighted
from lmtrain.objectives.config import DistillConfig
from lmtrain.objectives.cross_entropy import next_token_targets
from lmtrain.objectives.interface import LossTerms
from lmtrain.sharding.local import sum_over

# What the step adds to a batch: the main output of the teacher.
TAUGHT = "taught"


@dataclass(frozen=True)
class _Divergence:
    """The loss of each row. `teacher_cap`: see `Chunks.cap`."""

    temperature: float
    alpha: float
    teacher_cap: LogitCap | None

    def values(self, chunk: Chunk) -> jax.Array:
        return self._values_and_gradient(chunk)[0]

    def values_and_gradient(self, chunk: Chunk, weight_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        losses, d_logits = self._values_and_gradient(chunk)
        return weighted(losses, weight_T), weighted(d_logits, weight_T[:, None])

    def _values_and_gradient(self, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Losses [T], and the gradient of each with respect to its logits, [T, V]."""
        chunks, logits = chunk.of, chunk.logits
        theirs = chunks._replace(cap=self.teacher_cap).logits(*chunk.teacher) / self.temperature
        ours = logits / self.temperature
        their_sum, our_sum = chunks.log_sum(theirs), chunks.log_sum(ours)
        p, q = jnp.exp(theirs - their_sum[:, None]), jnp.exp(ours - our_sum[:, None])
        divergence = sum_over(chunks.vocab, (p * (theirs - ours)).sum(-1)) - their_sum + our_sum
        losses = self.alpha * self.temperature**2 * divergence
        d_logits = self.alpha * self.temperature * (q - p)
        if self.alpha < 1:
            log_sum = chunks.log_sum(logits)
            losses += (1 - self.alpha) * (log_sum - chunks.chosen(logits, chunk.head, chunk.target))
            d_logits += (1 - self.alpha) * (jnp.exp(logits - log_sum[:, None]) - chunk.is_target)
        return losses, d_logits


@dataclass(frozen=True)
class Distillation:
    """The mean over all target tokens."""

    temperature: float
    alpha: float

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return batch["loss_mask"]

    def loss_sum(self, outputs: Outputs, batch: Mapping[str, Any]) -> LossTerms:
        """See `Objective`; the batch has `TAUGHT`, too."""
        teacher: Head = batch[TAUGHT]
        loss = _Divergence(self.temperature, self.alpha, teacher.cap)
        targets = next_token_targets(batch["tokens"])
        return LossTerms(sum_of_losses(loss, outputs[MAIN], targets, self.weights(batch), teacher), {})


def build(config: DistillConfig, z_loss_weight: float) -> Distillation:
    """The loss of a config; it has no z-loss."""
    return Distillation(config.temperature, config.alpha)
