"""Sums of row losses without the logits of the entire batch, for any loss of a row's statistics.

A row is a position of a sequence. A loss depends on the logits through a few statistics, `LogitStatistics`, whose
gradients with respect to the logits are implemented here. So every objective is computed in chunks with three products
with the head, and needs no handwritten gradient.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.objectives.logits import Chunks
from lmtrain.sharding.local import per_device, scatter_sum, split_over, sum_over


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


class _LossArguments(NamedTuple):
    """Static arguments: the row loss, the chunks, and the mesh axes that the stored head is split over."""

    loss: RowLoss
    chunks: Chunks
    stored_vocab: tuple[str, ...]
    stored_embed: tuple[str, ...]


def sum_of_row_losses(
    loss: RowLoss,
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    vocab_size: int | None = None,
    logit_cap: float | None = None,
) -> jax.Array:
    """sum over positions of weight * loss(row of hidden @ head.T and its target), float32.

    Weights are float32, or bool for 0 and 1; rows with weight 0 are ignored. Rows of the head from `vocab_size` on are
    padding and are ignored too. With a `logit_cap`, logits are cap * tanh(logits / cap).

    Products with the head run in the inputs' precision; row statistics and all sums are float32. Each device computes
    its own rows in chunks. With gradients, those of each chunk are computed right after its loss, from the same logits:
    three products with the head, as with unchunked logits, while recomputing chunks in the backward pass needs four.
    Inside the loop, devices exchange only a few floats per row, and only if the vocabulary is split: the head is
    gathered before the loop, and its gradient is summed over devices after it.
    """
    chunks = Chunks.of(hidden_BSD, head_VD, vocab_size, logit_cap)
    static = _LossArguments(loss, chunks, split_over("vocab"), split_over("embed"))
    return _summed(hidden_BSD, head_VD, targets_BS, weights_BS, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _summed(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, static: _LossArguments
) -> jax.Array:
    chunks = static.chunks

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        def chunk(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            rows, target, weight = part
            row = _row(static, chunks.logits(rows, head), head, target)
            return total + _weighted(static.loss(row), weight).sum(), None

        parts = tuple(map(chunks.cut, (hidden, targets, weights)))
        return sum_over(chunks.rows, jax.lax.scan(chunk, jnp.float32(0), parts)[0])

    rows = chunks.of_rows
    total: jax.Array = per_device(local, (rows, chunks.of_head, rows, rows), PartitionSpec())(
        hidden, head, targets, weights
    )
    return total


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, static: _LossArguments
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    chunks = static.chunks
    stored_vocab, stored_embed = (
        tuple(name for name in stored if name in chunks.rows) for stored in (static.stored_vocab, static.stored_embed)
    )
    elsewhere = tuple(name for name in chunks.rows if name not in stored_vocab + stored_embed)
    # the sums over parts of the vocabulary nearly cancel: in bfloat16, gradients would have twice the error
    partial_sum = jnp.float32 if chunks.vocab else hidden.dtype

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array) -> Any:
        def chunk(sums: Any, part: Any) -> tuple[Any, jax.Array]:
            total, d_head = sums
            rows, target, weight = part
            logits = chunks.logits(rows, head)
            row = _row(static, logits, head, target)
            losses, backward = jax.vjp(lambda row: _weighted(static.loss(row), weight), row)
            (d_row,) = backward(jnp.ones_like(losses))
            d_logits = _d_logits(static, logits, head, target, row, d_row)
            d_logits = chunks.before_cap(d_logits, logits).astype(rows.dtype)
            d_head += jnp.einsum("TV,TD->VD", d_logits, rows, preferred_element_type=jnp.float32)
            d_rows = jnp.einsum("TV,VD->TD", d_logits, head, preferred_element_type=partial_sum)
            return (total + losses.sum(), d_head), d_rows

        zeros = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
        (total, d_head), d_rows = jax.lax.scan(chunk, zeros, tuple(map(chunks.cut, (hidden, targets, weights))))
        d_head = scatter_sum(scatter_sum(d_head, stored_vocab, 0), stored_embed, 1)
        d_hidden = scatter_sum(chunks.join(d_rows, hidden), chunks.gathered, 1)
        missing = tuple(name for name in chunks.vocab if name not in chunks.gathered)
        d_hidden = sum_over(missing, d_hidden).astype(hidden.dtype)
        return sum_over(chunks.rows, total), d_hidden, sum_over(elsewhere, d_head)

    rows = chunks.of_rows
    gradients = (
        PartitionSpec(chunks.batch, chunks.positions),
        PartitionSpec(chunks.vocab + stored_vocab, stored_embed),
    )
    total, d_hidden, d_head = per_device(local, (rows, chunks.of_head, rows, rows), (PartitionSpec(), *gradients))(
        hidden, head, targets, weights
    )
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(static: _LossArguments, gradients: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_head = gradients
    return (upstream * d_hidden).astype(d_hidden.dtype), (upstream * d_head).astype(d_head.dtype), None, None


_summed.defvjp(_forward, _backward)


def _row(static: _LossArguments, logits_TV: jax.Array, head: jax.Array, target_T: jax.Array) -> LogitStatistics:
    """The statistics of each row, from the logits of this device's part of the vocabulary."""
    mean = _mean(static.chunks, logits_TV, head) if static.loss.uses_mean else None
    return LogitStatistics(static.chunks.log_sum(logits_TV), static.chunks.chosen(logits_TV, head, target_T), mean)


def _mean(chunks: Chunks, logits_TV: jax.Array, head: jax.Array) -> jax.Array:
    here = jnp.where(chunks.is_token(head), logits_TV, 0.0).sum(-1)
    return sum_over(chunks.vocab, here) / chunks.vocab_size


def _weighted(losses_T: jax.Array, weight_T: jax.Array) -> jax.Array:
    """Weighted losses; 0 where the weight is 0, even if the loss is NaN."""
    if weight_T.dtype == bool:
        return jnp.where(weight_T, losses_T, 0.0)
    return jnp.where(weight_T != 0, weight_T * losses_T, 0.0)


def _d_logits(
    static: _LossArguments,
    logits_TV: jax.Array,
    head: jax.Array,
    target_T: jax.Array,
    row: LogitStatistics,
    d_row: LogitStatistics,
) -> jax.Array:
    """The gradient with respect to the logits, from `d_row`, that with respect to the statistics: d log_sum / d logits
    is the softmax, d chosen / d logits is 1 at the target, d mean / d logits is 1 / vocab_size."""
    chunks = static.chunks
    is_target = chunks.first_token(head) + jnp.arange(len(head)) == target_T[:, None]
    softmax = jnp.exp(logits_TV - row.log_sum[:, None])
    d_logits = softmax * d_row.log_sum[:, None] + jnp.where(is_target, d_row.chosen[:, None], 0.0)
    if d_row.mean is None:
        return d_logits
    return d_logits + jnp.where(chunks.is_token(head), d_row.mean[:, None] / chunks.vocab_size, 0.0)
