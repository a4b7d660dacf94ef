"""The evaluation step: the loss of one batch, as sums over its targets."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.interface import LanguageModel, hidden_and_head
from lmtrain.models.params import cast
from lmtrain.objectives.cross_entropy import CrossEntropy, next_token_targets
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.within import Within


def build_eval_step(
    model: LanguageModel,
    layout: Layout,
    compute_dtype: str,
    token_bytes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Within:
    """The jitted (params, batch) -> (summed loss, targets, bytes of their text), without dropout.

    The loss is the plain cross-entropy, regardless of the training objective. `token_bytes` [V] are the lengths of the
    tokens' texts in bytes; without it the third value is 0. `options` are compiler options.
    """

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        mask = batch["loss_mask"]
        lengths = jnp.int32(0)
        if token_bytes is not None:
            lengths = jnp.where(mask, jnp.asarray(token_bytes)[next_token_targets(batch["tokens"])], 0).sum()
        variables = {"params": cast(params, compute_dtype)}
        hidden, head = model.apply(variables, batch, True, method=hidden_and_head)
        return CrossEntropy().loss_sum(hidden, head, batch, model.vocab_size), mask.sum(), lengths

    jitted = jax.jit(evaluate, out_shardings=layout.replicated, compiler_options=dict(options or {}))
    return Within(layout, jitted)
