"""Losses of pairs of answers, one of which is preferred: DPO, IPO, ORPO and SimPO, with TRL's formulas.

    DPO   -(1 - e) log sigmoid(b m) - e log sigmoid(-b m)   Rafailov et al. 2023; smoothing e: Mitchell 2023 (cDPO)
    IPO   (m' - 1 / (2 b))^2                                Azar et al. 2023
    ORPO  nll - b log sigmoid(log odds ratio)               Hong et al. 2024
    SimPO -log sigmoid(b m'' - g)                           Meng et al. 2024

b is `beta`, g `gamma`. The margin m is log p(chosen) - log p(rejected), less the same by the reference, where log p is
the sum over the tokens of an answer; m' is that of means per token. ORPO and SimPO have no reference: odds are
p / (1 - p) with log p the mean per token, nll is the mean over all tokens of the prompt and the chosen answer, and m''
the margin of means per token.

    P pairs in a sequence, at most half of its tokens; 2: chosen, rejected
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.interface import MAIN, Outputs
from lmtrain.objectives.config import DpoConfig, OrpoConfig, SimpoConfig
from lmtrain.objectives.cross_entropy import next_token_targets
from lmtrain.objectives.interface import LossTerms
from lmtrain.objectives.row_losses import target_log_probs
from lmtrain.sharding.local import num_parts, per_device, split_over, sum_over
from lmtrain.sharding.placement import stream_axes


@jax.custom_vjp
def sum_by_document(values_BS: jax.Array, documents_BS: jax.Array) -> jax.Array:
    """The sum of the values of each document, [B, S] float32: entry n of a row is that of its document n.

    `documents` has the number of each position's document in its sequence.
    """
    batch, positions = _axes(values_BS)
    length = values_BS.shape[1]

    def local(values: jax.Array, documents: jax.Array) -> jax.Array:
        def row(values: jax.Array, documents: jax.Array) -> jax.Array:
            return jnp.zeros(length, jnp.float32).at[documents].add(values)

        return sum_over(positions, jax.vmap(row)(values.astype(jnp.float32), documents))

    rows = PartitionSpec(batch, positions)
    sums: jax.Array = per_device(local, (rows, rows), PartitionSpec(batch))(values_BS, documents_BS)
    return sums


def _forward(values: jax.Array, documents: jax.Array) -> tuple[jax.Array, jax.Array]:
    return sum_by_document(values, documents), documents


def _backward(documents_BS: jax.Array, upstream: jax.Array) -> tuple[Any, None]:
    batch, positions = _axes(documents_BS)
    rows = PartitionSpec(batch, positions)
    take = functools.partial(jnp.take_along_axis, axis=1)
    return per_device(take, (PartitionSpec(batch), rows), rows)(upstream, documents_BS), None


sum_by_document.defvjp(_forward, _backward)


def _axes(array_BS: jax.Array) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that rows and positions are split over."""
    batch = split_over("act_batch")
    assert array_BS.shape[0] % num_parts(batch) == 0
    return batch, stream_axes(array_BS.shape[1])


# Mean log-probabilities of ORPO stay below this: the odds of probability 1 are infinite.
_HIGHEST_LOG_PROB = -1e-6


@dataclass(frozen=True)
class Preferences:
    """The mean loss of the pairs of a batch in which both answers have target tokens."""

    loss: Literal["sigmoid", "ipo", "orpo", "simpo"]
    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0

    def weights(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Which pairs count, bool [B, P]."""
        return _are_complete(_by_answer(batch["loss_mask"], batch))

    def loss_sum(self, outputs: Outputs, batch: Mapping[str, jax.Array]) -> LossTerms:
        """The sum of losses over pairs; logged are rewards, their accuracy, and log-probabilities, under TRL's names.

        The reward of an answer is b * log p, less that by the reference.
        """
        targets = next_token_targets(batch["tokens"])
        log_probs_BS = target_log_probs(outputs[MAIN], targets)
        tokens_BP2 = _by_answer(batch["loss_mask"], batch)
        counts_BP = _are_complete(tokens_BP2)
        per_answer_BP2 = jnp.maximum(tokens_BP2, 1)
        log_probs_BP2 = _by_answer(jnp.where(batch["loss_mask"], log_probs_BS, 0.0), batch)
        logged = {}
        if self.loss in ("orpo", "simpo"):
            gain_BP2 = log_probs_BP2 = log_probs_BP2 / per_answer_BP2
        if self.loss == "orpo":
            nll = _nll_of_chosen(log_probs_BS, batch)
            losses = nll - self.beta * jax.nn.log_sigmoid(_log_odds_ratio(log_probs_BP2))
            logged["nll_loss"] = nll
        elif self.loss == "simpo":
            losses = -jax.nn.log_sigmoid(self.beta * _margin(log_probs_BP2) - self.gamma)
        else:
            gain_BP2 = log_probs_BP2 - _by_answer(batch["reference"], batch)
            if self.loss == "ipo":
                losses = (_margin(gain_BP2 / per_answer_BP2) - 1 / (2 * self.beta)) ** 2
            else:
                margin = self.beta * _margin(gain_BP2)
                losses = -(1 - self.label_smoothing) * jax.nn.log_sigmoid(margin)
                losses -= self.label_smoothing * jax.nn.log_sigmoid(-margin)
        logged |= {
            "rewards/chosen": self.beta * gain_BP2[..., 0],
            "rewards/rejected": self.beta * gain_BP2[..., 1],
            "rewards/margins": self.beta * _margin(gain_BP2),
            "rewards/accuracies": _margin(gain_BP2) > 0,
            "logps/chosen": log_probs_BP2[..., 0],
            "logps/rejected": log_probs_BP2[..., 1],
        }

        def total(values: jax.Array) -> jax.Array:
            return jnp.where(counts_BP, values, 0.0).sum()

        return LossTerms(total(losses), {name: total(jax.lax.stop_gradient(logged[name])) for name in logged})


def build(config: DpoConfig | OrpoConfig | SimpoConfig, z_loss_weight: float) -> Preferences:
    """The loss of a config; it has no z-loss."""
    if isinstance(config, OrpoConfig):
        return Preferences("orpo", config.beta)
    if isinstance(config, SimpoConfig):
        return Preferences("simpo", config.beta, gamma=config.gamma)
    return Preferences(config.loss, config.beta, config.label_smoothing)


def answer_log_probs(outputs: Outputs, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The log-probability of each document's target tokens, [B, S] float32: entry n of a row is that of document n."""
    targets = next_token_targets(batch["tokens"])
    log_probs = target_log_probs(outputs[MAIN], targets)
    return sum_by_document(jnp.where(batch["loss_mask"], log_probs, 0.0), batch["documents"])


def _by_answer(values_BS: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The sum of values of positions over each answer, [B, P, 2] float32; 0 where there is no pair."""
    sums = sum_by_document(values_BS, batch["documents"])
    pairs = sums.shape[1] // 2
    return sums[:, : 2 * pairs].reshape(-1, pairs, 2)


def _are_complete(tokens_BP2: jax.Array) -> jax.Array:
    """Which pairs have target tokens in both answers, given their numbers, bool [B, P]."""
    return (tokens_BP2 > 0).all(-1)


def _nll_of_chosen(log_probs_BS: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """The mean negative log-probability of all tokens of each chosen answer and its prompt, [B, P]."""
    documents = batch["documents"]
    inside = jnp.roll(documents, -1, axis=1) == documents
    inside = inside.at[:, -1].set(False)
    total = _by_answer(jnp.where(inside, log_probs_BS, 0.0), batch)
    return -(total / jnp.maximum(_by_answer(inside, batch), 1))[..., 0]


def _margin(values_BP2: jax.Array) -> jax.Array:
    """The difference between chosen and rejected answers, [B, P]."""
    return values_BP2[..., 0] - values_BP2[..., 1]


def _log_odds_ratio(log_probs_BP2: jax.Array) -> jax.Array:
    """log(odds of chosen / odds of rejected), [B, P]."""
    below_one = jnp.minimum(log_probs_BP2, _HIGHEST_LOG_PROB)
    log_odds = below_one - jnp.log(-jnp.expm1(below_one))
    return _margin(log_odds)
