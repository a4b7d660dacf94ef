"""Sums of losses over the rows of a batch, with gradients, without the logits of the entire batch.

A row is a position of a sequence. A loss gives, for the logits of a chunk of rows, the losses and their gradients with
respect to these logits. Those with respect to hidden states and head are computed here, with three products with the
head.
"""

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.objectives.logits import Chunks
from lmtrain.sharding.local import per_device, scatter_sum, split_over, sum_over

# Hidden states [B, S, D'] and head [V, D'] of a frozen teacher; empty without one.
Teacher = tuple[()] | tuple[jax.Array, jax.Array]


class Chunk(NamedTuple):
    """The float32 `logits` [T, V] of a chunk of rows, in this device's part of the vocabulary, whose head is `head`
    [V, D]; the `target` token of each row, [T]; and the teacher's hidden states [T, D'] and part of its head."""

    of: Chunks
    logits: jax.Array
    head: jax.Array
    target: jax.Array
    teacher: tuple[jax.Array, ...]

    @property
    def is_target(self) -> jax.Array:
        """[T, V] Which logits are those of the targets."""
        return self.of.first_token(self.head) + jnp.arange(len(self.head)) == self.target[:, None]


class ChunkLoss(Protocol):
    """The loss of each row of a chunk. Hashable, since it is a static part of the compiled program."""

    def __hash__(self) -> int: ...

    def values(self, chunk: Chunk) -> jax.Array:
        """[T] float32."""

    def values_and_gradient(self, chunk: Chunk, weight_T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Losses times weights, [T], and the gradient of their sum with respect to the logits, [T, V]."""


class _Arguments(NamedTuple):
    """Static arguments: the loss, the chunks, and the mesh axes that the stored head is split over."""

    loss: ChunkLoss
    chunks: Chunks
    stored_vocab: tuple[str, ...]
    stored_embed: tuple[str, ...]


def sum_of_losses(
    loss: ChunkLoss,
    hidden_BSD: jax.Array,
    head_VD: jax.Array,
    targets_BS: jax.Array,
    weights_BS: jax.Array,
    vocab_size: int | None = None,
    logit_cap: float | None = None,
    teacher: Teacher = (),
) -> jax.Array:
    """sum over positions of weight * loss(row of hidden @ head.T and its target), float32.

    Weights are float32, or bool for 0 and 1; rows with weight 0 are ignored. Rows of the head from `vocab_size` on are
    padding and are ignored too. With a `logit_cap`, logits are cap * tanh(logits / cap). A `teacher` has no gradients;
    its head has as many rows.

    Products with the head run in the inputs' precision; row statistics and all sums are float32. Each device computes
    its own rows in chunks. With gradients, those of each chunk are computed right after its loss, from the same logits:
    three products with the head, as with unchunked logits, while recomputing chunks in the backward pass needs four.
    Inside the loop, devices exchange only a few floats per row, and only if the vocabulary is split: the head is
    gathered before the loop, and its gradient is summed over devices after it.
    """
    chunks = Chunks.of(hidden_BSD, head_VD, vocab_size, logit_cap, arrays=1 + len(teacher) // 2)
    static = _Arguments(loss, chunks, split_over("vocab"), split_over("embed"))
    return _summed(hidden_BSD, head_VD, targets_BS, weights_BS, teacher, static)


def weighted(losses_T: jax.Array, weight_T: jax.Array) -> jax.Array:
    """Weighted losses; 0 where the weight is 0, even if the loss is NaN."""
    if weight_T.dtype == bool:
        return jnp.where(weight_T, losses_T, 0.0)
    return jnp.where(weight_T != 0, weight_T * losses_T, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, teacher: Teacher, static: _Arguments
) -> jax.Array:
    chunks = static.chunks

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, *teacher: jax.Array) -> Any:
        def chunk(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            rows, target, weight, *taught = part
            here = Chunk(chunks, chunks.logits(rows, head), head, target, (*taught, *teacher[1:]))
            return total + weighted(static.loss.values(here), weight).sum(), None

        parts = tuple(map(chunks.cut, (hidden, targets, weights, *teacher[:1])))
        return sum_over(chunks.rows, jax.lax.scan(chunk, jnp.float32(0), parts)[0])

    arguments = (hidden, head, targets, weights, *teacher)
    total: jax.Array = per_device(local, _specs(chunks, teacher), PartitionSpec())(*arguments)
    return total


def _forward(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, teacher: Teacher, static: _Arguments
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    chunks = static.chunks
    stored_vocab, stored_embed = (
        tuple(name for name in stored if name in chunks.rows) for stored in (static.stored_vocab, static.stored_embed)
    )
    elsewhere = tuple(name for name in chunks.rows if name not in stored_vocab + stored_embed)
    # the sums over parts of the vocabulary nearly cancel: in bfloat16, gradients would have twice the error
    partial_sum = jnp.float32 if chunks.vocab else hidden.dtype

    def local(hidden: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array, *teacher: jax.Array) -> Any:
        def chunk(sums: Any, part: Any) -> tuple[Any, jax.Array]:
            total, d_head = sums
            rows, target, weight, *taught = part
            here = Chunk(chunks, chunks.logits(rows, head), head, target, (*taught, *teacher[1:]))
            losses, d_logits = static.loss.values_and_gradient(here, weight)
            d_logits = chunks.before_cap(d_logits, here.logits).astype(rows.dtype)
            d_head += jnp.einsum("TV,TD->VD", d_logits, rows, preferred_element_type=jnp.float32)
            d_rows = jnp.einsum("TV,VD->TD", d_logits, head, preferred_element_type=partial_sum)
            return (total + losses.sum(), d_head), d_rows

        zeros = (jnp.float32(0), jnp.zeros(head.shape, jnp.float32))
        parts = tuple(map(chunks.cut, (hidden, targets, weights, *teacher[:1])))
        (total, d_head), d_rows = jax.lax.scan(chunk, zeros, parts)
        d_head = scatter_sum(scatter_sum(d_head, stored_vocab, 0), stored_embed, 1)
        d_hidden = scatter_sum(chunks.join(d_rows, hidden), chunks.gathered, 1)
        missing = tuple(name for name in chunks.vocab if name not in chunks.gathered)
        d_hidden = sum_over(missing, d_hidden).astype(hidden.dtype)
        return sum_over(chunks.rows, total), d_hidden, sum_over(elsewhere, d_head)

    gradients = (
        PartitionSpec(chunks.batch, chunks.positions),
        PartitionSpec(chunks.vocab + stored_vocab, stored_embed),
    )
    function = per_device(local, _specs(chunks, teacher), (PartitionSpec(), *gradients))
    total, d_hidden, d_head = function(hidden, head, targets, weights, *teacher)
    return total, (d_hidden, d_head.astype(head.dtype))


def _backward(static: _Arguments, gradients: tuple[jax.Array, jax.Array], upstream: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_head = gradients
    return (upstream * d_hidden).astype(d_hidden.dtype), (upstream * d_head).astype(d_head.dtype), None, None, None


_summed.defvjp(_forward, _backward)


def _specs(chunks: Chunks, teacher: Teacher) -> tuple[PartitionSpec, ...]:
    """The shardings of hidden states, head, targets, weights, and those of the teacher."""
    rows = chunks.of_rows
    return (rows, chunks.of_head, rows, rows, *(rows, chunks.of_head)[: len(teacher)])
