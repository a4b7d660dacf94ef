"""Next-token cross-entropy, with z-loss, label smoothing, and token weights; sampling of targets for Sophia."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from lmtrain.models.base_config import FurtherLoss
from lmtrain.models.interface import MAIN, Head, Outputs
from lmtrain.objectives.chunked_sums import Chunks
from lmtrain.objectives.config import CrossEntropyConfig, ObjectiveConfig, WeightedCrossEntropyConfig
from lmtrain.objectives.interface import LOSS, Loss, LossTerms, Objective, Weighted
from lmtrain.objectives.row_losses import LogitStatistics, sum_of_row_losses
from lmtrain.runtime.errors import UserError
from lmtrain.sharding.local import sum_over


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
    """Cross-entropy in which every target token has the same weight. The target of a position of the `output` is the
    token `shift` positions ahead."""

    row: CrossEntropyRow = CrossEntropyRow()
    output: str = MAIN
    shift: int = 1

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return has_target(batch, self.shift)

    def loss_sum(self, outputs: Outputs, batch: Mapping[str, jax.Array]) -> LossTerms:
        targets = next_token_targets(batch["tokens"], self.shift)
        return LossTerms(sum_of_row_losses(self.row, outputs[self.output], targets, self.weights(batch)), {})


@dataclass(frozen=True)
class WeightedCrossEntropy(CrossEntropy):
    """Cross-entropy in which target tokens have the weights `loss_weights` of the batch."""

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        return jnp.where(super().weights(batch), batch["loss_weights"], 0.0)


def build(config: CrossEntropyConfig | WeightedCrossEntropyConfig, z_loss_weight: float) -> CrossEntropy:
    """The loss of a config."""
    row = CrossEntropyRow(z_loss_weight, config.label_smoothing)
    return WeightedCrossEntropy(row) if isinstance(config, WeightedCrossEntropyConfig) else CrossEntropy(row)


def next_token_targets(tokens_BS: jax.Array, shift: int = 1) -> jax.Array:
    """The token `shift` positions ahead of each; the last targets are arbitrary and masked by every loss mask."""
    return jnp.roll(tokens_BS, -shift, axis=1)


def has_target(batch: Mapping[str, jax.Array], shift: int = 1) -> jax.Array:
    """Which positions have a target token `shift` positions ahead, in the same segment if there are any, bool [B, S].

    `loss_mask` of the batch has those with a target one position ahead.
    """
    mask, more = batch["loss_mask"], shift - 1
    if not more:
        return mask
    found = jnp.roll(mask, -more, axis=1) & (jnp.arange(mask.shape[1]) < mask.shape[1] - more)
    segments = batch.get("segments")
    return found if segments is None else found & (jnp.roll(segments, -more, axis=1) == segments)


# The cumulative sum runs over blocks of the vocabulary, then within the selected block: accurate enough in float32.
_BLOCK = 128


def sample_targets(head: Head, key: jax.Array) -> jax.Array:
    """A token for each position, sampled from the softmax of its logits. -> int32 [B, S]

    One uniform number per position, generated from `key` alone, is looked up in the cumulative probabilities: except
    for rounding, the samples do not depend on how rows and vocabulary are split.
    """
    chunks = Chunks.of(head)
    uniform_BS = jax.random.uniform(key, head.hidden.shape[:2])
    drawn: jax.Array = chunks.map_rows(functools.partial(_draw, chunks), head, uniform_BS)
    return drawn


def _draw(chunks: Chunks, logits_TV: jax.Array, head: jax.Array, uniform_T: jax.Array) -> jax.Array:
    """The token at which the cumulative probability exceeds `uniform_T`, [T]."""
    highest = logits_TV.max(-1)
    if chunks.vocab:
        highest = jax.lax.pmax(highest, chunks.vocab)
    weights = jnp.pad(jnp.exp(logits_TV - highest[:, None]), ((0, 0), (0, -len(head) % _BLOCK)))
    blocks_TNb = weights.reshape(len(weights), -1, _BLOCK)
    until_TN = jnp.cumsum(blocks_TNb.sum(-1), axis=-1)
    rest_T, is_mine = _share(chunks, until_TN[:, -1], uniform_T)
    block_T = jnp.minimum((until_TN <= rest_T[:, None]).sum(-1), until_TN.shape[1] - 1)
    skipped = jnp.take_along_axis(jnp.pad(until_TN, ((0, 0), (1, 0))), block_T[:, None], axis=1)
    inside_Tb = jnp.cumsum(jnp.take_along_axis(blocks_TNb, block_T[:, None, None], axis=1)[:, 0], axis=-1)
    column_T = block_T * _BLOCK + jnp.minimum((inside_Tb <= rest_T[:, None] - skipped).sum(-1), _BLOCK - 1)
    token_T = jnp.minimum(chunks.first_token(head) + column_T, chunks.vocab_size - 1)
    return sum_over(chunks.vocab, jnp.where(is_mine, token_T, 0)).astype(jnp.int32)


def _share(chunks: Chunks, weight_T: jax.Array, uniform_T: jax.Array) -> tuple[jax.Array, jax.Array | bool]:
    """The cumulative weight to reach in this device's part of the vocabulary, and whether the token is in this part."""
    if not chunks.vocab:
        return uniform_T * weight_T, True
    until_PT = jnp.cumsum(jax.lax.all_gather(weight_T, chunks.vocab), axis=0)
    wanted_T = uniform_T * until_PT[-1]
    owner_T = jnp.minimum((until_PT <= wanted_T).sum(0), len(until_PT) - 1)
    before_T = jnp.take_along_axis(jnp.pad(until_PT, ((1, 0), (0, 0))), owner_T[None], axis=0)[0]
    return wanted_T - before_T, owner_T == jax.lax.axis_index(chunks.vocab)


def build_objective(
    config: ObjectiveConfig, z_loss_weight: float, further: Mapping[str, FurtherLoss] | None = None
) -> Objective:
    """The objective of a run; `further` are the losses of the model's outputs besides the main one.

    If the main loss is a cross-entropy, the others have its settings. Raises `UserError` for answers in pairs and a
    model with further outputs: both answers would be learned.
    """
    main: Loss = config.build(z_loss_weight)
    if further and config.needs_pairs:
        raise UserError(f"objective.type: {config.type} cannot train the model's outputs {', '.join(further)}")
    like = main if isinstance(main, CrossEntropy) else CrossEntropy()
    others = {
        name: Weighted(replace(like, output=own.output, shift=own.shift), own.coefficient)
        for name, own in (further or {}).items()
    }
    return {LOSS: Weighted(main), **others}
