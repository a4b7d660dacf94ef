"""Log-probabilities of the targets of a batch, with gradients, without the logits of the entire batch."""

import functools
from dataclasses import dataclass
from typing import Any

import jax

from lmtrain.objectives.row_losses import LogitStatistics, sum_of_row_losses
from lmtrain.objectives.target_scores import score_targets


@dataclass(frozen=True)
class _LogProb:
    """The log-probability of the target."""

    uses_mean = False

    def __call__(self, row: LogitStatistics) -> jax.Array:
        return row.chosen - row.log_sum


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def target_log_probs(
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    vocab_size: int | None = None,
    logit_cap: float | None = None,
) -> jax.Array:
    """The log-probability of each target by the logits `hidden @ head.T`, capped if there is a cap. -> [B, S] float32

    For losses that need all of them before the weight of any is known. Gradients recompute the logits in chunks: four
    products with the head, one more than those of `sum_of_row_losses`.
    """
    return score_targets(hidden_BSD, head_VD, targets_BS, vocab_size, logit_cap).log_prob


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, vocab_size: int | None, logit_cap: float | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return target_log_probs(hidden, head, targets, vocab_size, logit_cap), (hidden, head, targets)


def _backward(vocab_size: int | None, logit_cap: float | None, saved: Any, upstream_BS: jax.Array) -> tuple[Any, ...]:
    hidden, head, targets = saved

    def weighted(hidden: jax.Array, head: jax.Array) -> jax.Array:
        return sum_of_row_losses(_LogProb(), hidden, head, targets, upstream_BS, vocab_size, logit_cap)

    return *jax.grad(weighted, (0, 1))(hidden, head), None


target_log_probs.defvjp(_forward, _backward)
