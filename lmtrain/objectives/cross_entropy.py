"""Next-token cross-entropy, with z-loss, label smoothing, and token weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lmtrain.objectives.interface import LossTerms
from lmtrain.objectives.row_losses import LogitStatistics, sum_of_row_losses


@dataclass(frozen=True)
class CrossEntropyRow:
    """Loss of each row: -sum_v q_v log p_v + z_loss_weight * log_sum^2, where p is the softmax of the logits, log_sum
    their log-sum-exp (z-loss: Chowdhery et al. 2022, PaLM, section 5), and q is 1 - label_smoothing at the target plus
    label_smoothing / V everywhere (label smoothing: Szegedy et al. 2016, section 7)."""

    z_loss_weight: float = 0.0
    label_smoothing: float = 0.0

    @property
    def uses_mean(self) -> bool:
        return self.label_smoothing > 0

    def __call__(self, row: LogitStatistics) -> jax.Array:
        loss = row.log_sum - row.chosen
        if row.mean is not None:
            loss = loss + self.label_smoothing * (row.chosen - row.mean)
        if self.z_loss_weight:
            loss = loss + self.z_loss_weight * row.log_sum**2
        return loss


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy in which every target token has the same weight."""

    row: CrossEntropyRow = CrossEntropyRow()

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return batch["loss_mask"]

    def loss_sum(
        self,
        hidden_BSD: jax.Array,
        head_VD: jax.Array,
        batch: Mapping[str, jax.Array],
        vocab_size: int,
        logit_cap: float | None = None,
    ) -> LossTerms:
        targets, weights = next_token_targets(batch["tokens"]), self.weights(batch)
        total = sum_of_row_losses(self.row, hidden_BSD, head_VD, targets, weights, vocab_size, logit_cap)
        return LossTerms(total, {})


@dataclass(frozen=True)
class WeightedCrossEntropy(CrossEntropy):
    """Cross-entropy in which target tokens have the weights `loss_weights` of the batch."""

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.where(batch["loss_mask"], batch["loss_weights"], 0.0)


def next_token_targets(tokens_BS: jax.Array) -> jax.Array:
    """The token after each position; the last position's target is arbitrary and masked by every loss mask."""
    return jnp.roll(tokens_BS, -1, axis=1)
