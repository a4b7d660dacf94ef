"""The scoring step: log-probabilities of some tokens of each sequence of a batch."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.interface import LanguageModel, hidden_and_head
from lmtrain.models.params import cast
from lmtrain.objectives.target_scores import TargetScores, score_targets
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.placement import constrain
from lmtrain.sharding.within import Within


def build_score_step(
    model: LanguageModel, layout: Layout, compute_dtype: str, options: Mapping[str, Any] | None = None
) -> Within:
    """The jitted (params, batch) -> `TargetScores` [B, T], without dropout.

    The batch has `tokens` [B, S], `places` [B, T], and `targets` [B, T], all int32: target t of a sequence is a
    candidate for the token after position `places[t]`. Only the logits of these positions are computed.
    """

    def score(params: Any, batch: Mapping[str, jax.Array]) -> TargetScores:
        variables = {"params": cast(params, compute_dtype)}
        only_tokens = {"tokens": batch["tokens"]}
        hidden, head = model.apply(variables, only_tokens, True, method=hidden_and_head)
        chosen = jnp.take_along_axis(hidden, batch["places"][:, :, None], axis=1)
        chosen = constrain(chosen, "act_batch", "act_seq", None)
        return score_targets(chosen, head, batch["targets"], model.vocab_size)

    return Within(layout, jax.jit(score, out_shardings=layout.replicated, compiler_options=dict(options or {})))
