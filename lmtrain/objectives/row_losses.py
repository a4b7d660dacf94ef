"""Sums of row losses without the logits of the entire batch, for any loss of a row's statistics; log-probabilities of
targets.

A row is a position of a sequence. A loss depends on the logits through a few statistics, `LogitStatistics`, whose
gradients with respect to the logits are implemented here. So such an objective needs no handwritten gradient.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lmtrain.models.interface import Head
from lmtrain.objectives.chunked_sums import Chunk, Chunks, sum_of_losses, weighted
from lmtrain.sharding.local import sum_over


class TargetScores(NamedTuple):
    """For each target: its log-probability, [B, T] float32, and whether it is the most likely token, [B, T] bool."""

    log_prob: jax.Array
    is_best: jax.Array


def score_targets(head: Head, targets_BT: jax.Array) -> TargetScores:
    """Score each target by the logits of its own position.

    Products run in the inputs' precision, all else in float32. Of
    several most likely tokens the first one counts, as in argmax.
    """
    chunks = Chunks.of(head)

    def score(logits: jax.Array, matrix: jax.Array, target: jax.Array) -> TargetScores:
        log_prob = chunks.chosen(logits, matrix, target) - chunks.log_sum(logits)
        return TargetScores(log_prob, chunks.most_likely(logits, matrix) == target)

    scores: TargetScores = chunks.map_rows(score, head, targets_BT)
    return scores


class LogitStatistics(NamedTuple):
    """Statistics of each row's logits over the entire vocabulary, [T] float32.

    `log_sum` is the log-sum-exp, `chosen` the target's logit, `mean` the mean of all logits, None unless the loss uses
    it.
    """

    log_sum: jax.Array
    chosen: jax.Array
    mean: jax.Array | None


class RowLoss(Protocol):
    """The loss of each row, [T] float32. Hashable, since it is a static part of the compiled program."""

    @property
    def uses_mean(self) -> bool:
        """Whether the loss reads `LogitStatistics.mean`, which costs a sum over the vocabulary."""

    def __hash__(self) -> int: ...

    def __call__(self, row: LogitStatistics) -> jax.Array: ...


def sum_of_row_losses(loss: RowLoss, head: Head, targets_BS: jax.Array, weights_BS: jax.Array) -> jax.Array:
    """sum over positions of weight * loss(row of the logits and its target), float32; see `sum_of_losses`."""
    return sum_of_losses(_OfStatistics(loss), head, targets_BS, weights_BS)


@dataclass(frozen=True)
class _OfStatistics:
    """A row loss as a loss of chunks."""

    loss: RowLoss

    def values(self, chunk: Chunk) -> jax.Array:
        return self.loss(self._statistics(chunk))

    def values_and_gradient(self, chunk: Chunk, weight_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = self._statistics(chunk)
        losses, backward = jax.vjp(lambda row: weighted(self.loss(row), weight_T), row)
        (d_row,) = backward(jnp.ones_like(losses))
        return losses, _d_logits(chunk, row, d_row)

    def _statistics(self, chunk: Chunk) -> LogitStatistics:
        """The statistics of each row, from the logits of this device's part of the vocabulary."""
        mean = _mean(chunk) if self.loss.uses_mean else None
        chosen = chunk.of.chosen(chunk.logits, chunk.head, chunk.target)
        return LogitStatistics(chunk.of.log_sum(chunk.logits), chosen, mean)


def _mean(chunk: Chunk) -> jax.Array:
    here = jnp.where(chunk.of.is_token(chunk.head), chunk.logits, 0.0).sum(-1)
    return sum_over(chunk.of.vocab, here) / chunk.of.vocab_size


def _d_logits(chunk: Chunk, row: LogitStatistics, d_row: LogitStatistics) -> jax.Array:
    """The gradient with respect to the logits, from `d_row`, that with respect to the statistics: d log_sum / d logits
    is the softmax, d chosen / d logits is 1 at the target, d mean / d logits is 1 / vocab_size."""
    softmax = jnp.exp(chunk.logits - row.log_sum[:, None])
    d_logits = softmax * d_row.log_sum[:, None] + jnp.where(chunk.is_target, d_row.chosen[:, None], 0.0)
    if d_row.mean is None:
        return d_logits
    return d_logits + jnp.where(chunk.of.is_token(chunk.head), d_row.mean[:, None] / chunk.of.vocab_size, 0.0)


@dataclass(frozen=True)
class _LogProb:
    """The log-probability of the target."""

    uses_mean = False

    def __call__(self, row: LogitStatistics) -> jax.Array:
        return row.chosen - row.log_sum


@jax.custom_vjp
def target_log_probs(head: Head, targets_BS: jax.Array) -> jax.Array:
    """The log-probability of each target. -> [B, S] float32

    For losses that need all of them before the weight of any is known. Gradients recompute the logits in chunks: four
    products with the head, one more than those of `sum_of_row_losses`.
    """
    return score_targets(head, targets_BS).log_prob


def _forward(head: Head, targets: jax.Array) -> tuple[jax.Array, tuple[Head, jax.Array]]:
    return target_log_probs(head, targets), (head, targets)


def _backward(saved: tuple[Head, jax.Array], upstream_BS: jax.Array) -> tuple[Head, None]:
    head, targets = saved
    return jax.grad(lambda head: sum_of_row_losses(_LogProb(), head, targets, upstream_BS))(head), None


target_log_probs.defvjp(_forward, _backward)
