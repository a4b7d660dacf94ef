"""The evaluation step, the loss of one batch as sums over its targets, and steps over many batches."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.hf.tokenizer import TextSizes
from lmtrain.models.interface import LanguageModel, Outputs, outputs_of
from lmtrain.models.params import cast_to_compute
from lmtrain.objectives.cross_entropy import CrossEntropy, next_token_targets
from lmtrain.sharding.mesh import Layout, MeshFunction

# Maximum number of batches dispatched ahead of the result that is read next.
_AHEAD = 4


def build_eval_step(
    model: LanguageModel,
    layout: Layout,
    compute_dtype: str,
    sizes: TextSizes | None = None,
    options: Mapping[str, Any] | None = None,
) -> MeshFunction:
    """The jitted (params, batch) -> (summed loss, targets, bytes of their text), without dropout.

    The loss is the plain cross-entropy, regardless of the training objective; of pairs of answers, that of the chosen
    ones. `sizes` are those of the tokens' texts; without them the third value is 0. `options` are compiler options.
    """

    def evaluate(outputs: Outputs, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        mask = batch["loss_mask"]
        if "documents" in batch:  # see `lmtrain/data/windows.py`
            mask = mask & (batch["documents"] % 2 == 0)
            batch = batch | {"loss_mask": mask}
        lengths = jnp.int32(0)
        if sizes is not None:
            lengths = jnp.where(mask, _text_bytes(sizes, batch), 0).sum()
        loss = CrossEntropy().loss_sum(outputs, batch).total
        return loss, mask.sum(), lengths

    return build_forward_step(model, layout, compute_dtype, evaluate, options)


def _text_bytes(sizes: TextSizes, batch: Any) -> jax.Array:
    """Bytes of the text of each target, [B, S]."""
    targets = next_token_targets(batch["tokens"])
    lengths = jnp.asarray(sizes.sizes)[targets]
    if sizes.first is None:
        return lengths
    starts = jnp.isin(batch["tokens"], jnp.asarray(sizes.after, jnp.int32))
    if "segments" in batch:  # documents need not have tokens at their ends
        starts |= next_token_targets(batch["segments"]) != batch["segments"]
    return jnp.where(starts, jnp.asarray(sizes.first)[targets], lengths)


def build_forward_step(
    model: LanguageModel,
    layout: Layout,
    compute_dtype: str,
    function: Callable[[Outputs, Any], Any],
    options: Mapping[str, Any] | None = None,
) -> MeshFunction:
    """The jitted (params, batch) -> `function(outputs, batch)` on every device, without dropout.

    `options` are compiler options.
    """

    def forward(params: Any, batch: Any) -> Any:
        variables = {"params": cast_to_compute(params, compute_dtype)}
        return function(model.apply(variables, batch, True, method=outputs_of), batch)

    jitted = jax.jit(forward, out_shardings=layout.replicated, compiler_options=dict(options or {}))
    return MeshFunction(layout, jitted)


def read_ahead(
    step: Callable[[Any, Any], Any], params: Any, batches: Iterable[Any], between: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """`step(params, batch)` of each batch, in order; `between` is called after each is dispatched.

    Some batches are dispatched before the first result is read, so that the device is never idle; not all, because each
    needs memory, and a run that stops has to wait for them.
    """
    waiting = deque[Any]()
    for batch in batches:
        waiting.append(step(params, batch))
        if len(waiting) > _AHEAD:
            yield waiting.popleft()
        between()
    yield from waiting
