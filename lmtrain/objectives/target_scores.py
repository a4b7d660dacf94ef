"""Log-probabilities of given tokens, without the logits of the entire batch."""

from typing import NamedTuple

import jax

from lmtrain.objectives.logits import Chunks


class TargetScores(NamedTuple):
    """For each target: its log-probability, [B, T] float32, and whether it is the most likely token, [B, T] bool."""

    log_prob: jax.Array
    is_best: jax.Array


def score_targets(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    vocab_size: int | None = None,
    logit_cap: float | None = None,
) -> TargetScores:
    """Score each target by the logits `hidden @ head.T` of its own position, capped if there is a cap.

    Rows of the head from `vocab_size` on are padding. Products run in the inputs' precision, all else in float32. Of
    several most likely tokens the first one counts, as in argmax.
    """
    chunks = Chunks.of(hidden_BTD, head_VD, vocab_size, logit_cap)

    def score(logits: jax.Array, head: jax.Array, target: jax.Array) -> TargetScores:
        log_prob = chunks.chosen(logits, head, target) - chunks.log_sum(logits)
        return TargetScores(log_prob, chunks.most_likely(logits, head) == target)

    scores: TargetScores = chunks.map_rows(score, hidden_BTD, head_VD, targets_BT)
    return scores
