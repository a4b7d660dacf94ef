"""Log-probabilities of given tokens, without the logits of the entire batch."""

from typing import Any, NamedTuple

import jax

from lmtrain.objectives.logits import Chunks
from lmtrain.sharding.local import per_device


class TargetScores(NamedTuple):
    """For each target: its log-probability, [B, T] float32, and whether it is the most likely token, [B, T] bool."""

    log_prob: jax.Array
    is_best: jax.Array


def score_targets(
    hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, vocab_size: int | None = None
) -> TargetScores:
    """Score each target by the logits `hidden @ head.T` of its own position.

    Rows of the head from `vocab_size` on are padding. Products run in the inputs' precision, all else in float32. Of
    several most likely tokens the first one counts, as in argmax.
    """
    chunks = Chunks.plan(hidden_BTD, head_VD, vocab_size)

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        def one(_: None, part: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
            rows, target = part
            logits = chunks.logits(rows, head)
            log_prob = chunks.chosen(logits, head, target) - chunks.log_sum(logits)
            return None, (log_prob, chunks.most_likely(logits, head) == target)

        log_prob, is_best = jax.lax.scan(one, None, (chunks.cut(hidden), chunks.cut(targets)))[1]
        return chunks.join(log_prob, targets), chunks.join(is_best, targets)

    rows = chunks.of_rows
    scored = per_device(local, (rows, chunks.of_head, rows), (rows, rows))(hidden_BTD, head_VD, targets_BT)
    return TargetScores(*scored)
