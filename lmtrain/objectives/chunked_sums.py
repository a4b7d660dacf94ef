"""Sums of losses over the rows of a batch, with gradients, without the logits of the entire batch; logits of a chunk.

A row is a position of a sequence. A loss gives, for the logits of a chunk of rows, the losses and their gradients with
respect to these logits. Those with respect to hidden states and head are computed here, with three products with the
head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.models.interface import Head, LogitCap
from lmtrain.sharding.local import num_parts, per_device, platform, scatter_sum, split_over, sum_over
from lmtrain.sharding.placement import stream_axes

# Logits in chunks of rows, on each device for its own rows: never for the entire batch at once.
#
# A row is a position of a sequence. The head is gathered once, before the loop over the chunks. If the vocabulary is
# split over devices (tensor parallelism), a device computes the logits of its part of the vocabulary, for the rows of
# all devices that share the vocabulary with it.
#
#     T rows of a chunk  D embed  V vocab (a device's part of it)

# Number of logits that a device holds at once. Each chunk reads the head and adds to its float32 gradient: with few
# rows that is most of the memory traffic. A CPU is fastest with chunks that fit in its caches.
_LOGITS_AT_ONCE = {"cpu": 2**22, "gpu": 2**28, "tpu": 2**27}
_MIN_ROWS = {"cpu": 64, "gpu": 1024, "tpu": 1024}

# If the rows do not divide evenly, chunk sizes are multiples of this, which matches the hardware's tiles.
_TILE = 128

# Far below any logit, and finite: its exponential is 0, and so is its gradient.
_NO_TOKEN = -1e30


class Projection(NamedTuple):
    """A head without its hidden states: the matrix [V, D], and the bias [V] or None; or the sharding of each."""

    matrix: Any
    bias: Any

    @classmethod
    def of(cls, head: Head) -> "Projection":
        return cls(head.matrix, head.bias)


class Chunks(NamedTuple):
    """The split of rows and head over devices, as mesh axes, and of a device's rows into chunks.

    `positions` are split outside the per-device function; inside, they are gathered along the axes of `vocab`. The
    head's rows from `vocab_size` on are padding. Logits are below the `cap` if there is one.
    """

    batch: tuple[str, ...]
    positions: tuple[str, ...]
    vocab: tuple[str, ...]
    size: int
    vocab_size: int
    padded_size: int
    cap: LogitCap | None

    @classmethod
    def of(cls, head: Head, arrays: int = 1) -> "Chunks":
        """The split in the program being traced, for these global arrays; `arrays` of logits are in memory at once."""
        batch, positions, vocab = split_over("act_batch"), stream_axes(head.hidden.shape[1]), split_over("act_vocab")
        entries = head.matrix.shape[0]
        chunks = cls(batch, positions, vocab, 0, head.vocab_size or entries, entries, head.cap)
        rows = head.hidden.shape[0] * head.hidden.shape[1] // num_parts(chunks.rows)
        return chunks._replace(size=rows_at_once(rows, arrays * entries // num_parts(vocab), platform()))

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes along which positions are split outside and gathered inside, since they split the vocabulary."""
        return tuple(name for name in self.positions if name in self.vocab)

    @property
    def rows(self) -> tuple[str, ...]:
        """Axes along which devices have different rows."""
        return self.batch + tuple(name for name in self.positions if name not in self.vocab)

    @property
    def of_rows(self) -> PartitionSpec:
        """The sharding of [B, S, ...] arrays inside."""
        return PartitionSpec(self.batch, self.rows[len(self.batch) :])

    @property
    def of_head(self) -> PartitionSpec:
        """The sharding of the head and its bias inside."""
        return PartitionSpec(self.vocab)

    def cut(self, array: jax.Array) -> jax.Array:
        """[B, S, ...] as [chunks, size, ...]; the last chunk is padded with zeros, which are masked rows."""
        rows = array.reshape(-1, *array.shape[2:])
        if extra := -len(rows) % self.size:
            rows = jnp.pad(rows, ((0, extra), *((0, 0) for _ in rows.shape[1:])))
        return rows.reshape(-1, self.size, *rows.shape[1:])

    def join(self, chunks: jax.Array, like: jax.Array) -> jax.Array:
        """The inverse of `cut`: [chunks, size, ...] as [B, S, ...], with B and S of `like`."""
        batch, length = like.shape[:2]
        rows = chunks.reshape(-1, *chunks.shape[2:])[: batch * length]
        return rows.reshape(batch, length, *rows.shape[1:])

    def map_rows(self, function: Callable[..., Any], of: Head, *arrays_BS: jax.Array) -> Any:
        """`function(logits [T, V], head's matrix, rows of each array [T])` of each chunk -> a tree of results, [B, S]
        each."""

        def local(hidden: jax.Array, head: Projection, *arrays: jax.Array) -> Any:
            def chunk(_: None, part: tuple[jax.Array, ...]) -> tuple[None, Any]:
                return None, function(self.logits(part[0], head), head.matrix, *part[1:])

            _, results = jax.lax.scan(chunk, None, tuple(map(self.cut, (hidden, *arrays))))
            return jax.tree.map(lambda result: self.join(result, hidden), results)

        rows = self.of_rows
        specs = (rows, self.of_head, *(rows for _ in arrays_BS))
        return per_device(local, specs, rows)(of.hidden, Projection.of(of), *arrays_BS)

    def first_token(self, head_VD: jax.Array) -> jax.Array | int:
        """The id of the first token in this device's part of the vocabulary."""
        return jax.lax.axis_index(self.vocab) * len(head_VD) if self.vocab else 0

    def is_token(self, head_VD: jax.Array) -> jax.Array:
        """[V] Which entries of this device's part of the vocabulary are tokens, not padding."""
        return self.first_token(head_VD) + jnp.arange(len(head_VD)) < self.vocab_size

    def logits(self, rows_TD: jax.Array, head: Projection) -> jax.Array:
        """Float32 logits [T, V] of this device's part of the vocabulary; padding has a very low logit."""
        logits = jnp.einsum("TD,VD->TV", rows_TD, head.matrix).astype(jnp.float32)
        if head.bias is not None:
            logits += head.bias.astype(jnp.float32)
        if self.cap is not None:
            logits = self.cap(logits)
        if self.vocab_size == self.padded_size:
            return logits
        return jnp.where(self.is_token(head.matrix), logits, _NO_TOKEN)

    def before_cap(self, d_logits_TV: jax.Array, logits_TV: jax.Array) -> jax.Array:
        """The gradient with respect to the products with the head; that of padding is 0."""
        return d_logits_TV if self.cap is None else d_logits_TV * self.cap.slope(logits_TV)

    def log_sum(self, logits_TV: jax.Array) -> jax.Array:
        """The log-sum-exp over the entire vocabulary, [T]."""
        highest, total = _highest_and_total(logits_TV)
        highest = jax.lax.stop_gradient(highest)
        if self.vocab:
            overall = jax.lax.pmax(highest, self.vocab)
            highest, total = overall, sum_over(self.vocab, total * jnp.exp(highest - overall))
        return highest + jnp.log(total)

    def chosen(self, logits_TV: jax.Array, head_VD: jax.Array, target_T: jax.Array) -> jax.Array:
        """The target's logit, [T]."""
        column = target_T - self.first_token(head_VD)
        inside = (column >= 0) & (column < len(head_VD))
        chosen = jnp.take_along_axis(logits_TV, jnp.clip(column, 0, len(head_VD) - 1)[:, None], axis=-1)[:, 0]
        return sum_over(self.vocab, jnp.where(inside, chosen, 0.0))

    def most_likely(self, logits_TV: jax.Array, head_VD: jax.Array) -> jax.Array:
        """The token with the highest logit, the first of several, [T]."""
        best, token = logits_TV.max(-1), logits_TV.argmax(-1) + self.first_token(head_VD)
        if not self.vocab:
            return token
        is_best = best == jax.lax.pmax(best, self.vocab)
        return jax.lax.pmin(jnp.where(is_best, token, self.padded_size), self.vocab)


@jax.custom_jvp
def _highest_and_total(logits_TV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's highest logit, and the sum of the exponentials of all logits minus the highest."""
    if platform() != "gpu":
        highest = logits_TV.max(-1)
        return highest, jnp.exp(logits_TV - highest[:, None]).sum(-1)

    def joined(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (a, total_a), (b, total_b) = left, right
        lower = jnp.exp(-jnp.abs(a - b))
        return jnp.maximum(a, b), jnp.where(a > b, total_a + total_b * lower, total_a * lower + total_b)

    # one reduction reads the logits once from memory, two would twice
    first = jnp.float32(_NO_TOKEN), jnp.float32(0)
    highest, total = jax.lax.reduce((logits_TV, jnp.ones_like(logits_TV)), first, joined, (1,))
    return highest, total


@_highest_and_total.defjvp
def _highest_and_total_jvp(primals: Any, tangents: Any) -> Any:
    """The derivative of the total for a constant highest logit, on which their log-sum-exp does not depend."""
    highest, total = _highest_and_total(*primals)
    softmax = jnp.exp(primals[0] - highest[:, None])
    return (highest, total), (jnp.zeros_like(highest), (softmax * tangents[0]).sum(-1))


def rows_at_once(rows: int, vocab: int, kind: str) -> int:
    """Rows per chunk, for a device of platform `kind` with `rows` rows and `vocab` entries of the vocabulary."""
    limit = min(max(_LOGITS_AT_ONCE[kind] // vocab, _MIN_ROWS[kind]), rows)
    min_chunks = -(-rows // limit)
    for chunks in range(min_chunks, 2 * min_chunks):
        if rows % chunks == 0:
            return rows // chunks
    even = -(-rows // min_chunks)
    return -(-even // _TILE) * _TILE if even > _TILE else even


# Hidden states [B, S, D'] and head [V, D'] of a frozen teacher; empty without one.
Teacher = tuple[()] | tuple[jax.Array, Projection]


class Chunk(NamedTuple):
    """The float32 `logits` [T, V] of a chunk of rows, in this device's part of the vocabulary, whose head is `head`
    [V, D]; the `target` token of each row, [T]; and the teacher's hidden states [T, D'] and part of its head."""

    of: Chunks
    logits: jax.Array
    head: jax.Array
    target: jax.Array
    teacher: Teacher

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
    loss: ChunkLoss, head: Head, targets_BS: jax.Array, weights_BS: jax.Array, teacher: Head | None = None
) -> jax.Array:
    """sum over positions of weight * loss(row of the logits of `head` and its target), float32.

    Weights are float32, or bool for 0 and 1; rows with weight 0 are ignored. A `teacher` has no gradients; its matrix
    has as many rows.

    Products with the head run in the inputs' precision; row statistics and all sums are float32. Each device computes
    its own rows in chunks. With gradients, those of each chunk are computed right after its loss, from the same logits:
    three products with the head, as with unchunked logits, while recomputing chunks in the backward pass needs four.
    Inside the loop, devices exchange only a few floats per row, and only if the vocabulary is split: the head is
    gathered before the loop, and its gradient is summed over devices after it.
    """
    chunks = Chunks.of(head, arrays=1 if teacher is None else 2)
    static = _Arguments(loss, chunks, split_over("vocab"), split_over("embed"))
    taught: Teacher = () if teacher is None else (teacher.hidden, Projection.of(teacher))
    return _summed(head.hidden, Projection.of(head), targets_BS, weights_BS, taught, static)


def weighted(losses_T: jax.Array, weight_T: jax.Array) -> jax.Array:
    """Weighted losses; 0 where the weight is 0, even if the loss is NaN."""
    if weight_T.dtype == bool:
        return jnp.where(weight_T, losses_T, 0.0)
    return jnp.where(weight_T != 0, weight_T * losses_T, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _summed(
    hidden: jax.Array, head: Projection, targets: jax.Array, weights: jax.Array, teacher: Teacher, static: _Arguments
) -> jax.Array:
    chunks = static.chunks

    def local(hidden: jax.Array, head: Projection, targets: jax.Array, weights: jax.Array, *teacher: Any) -> Any:
        def chunk(total: jax.Array, part: Any) -> tuple[jax.Array, None]:
            rows, target, weight, *taught = part
            here = Chunk(chunks, chunks.logits(rows, head), head.matrix, target, (*taught, *teacher[1:]))
            return total + weighted(static.loss.values(here), weight).sum(), None

        parts = tuple(map(chunks.cut, (hidden, targets, weights, *teacher[:1])))
        return sum_over(chunks.rows, jax.lax.scan(chunk, jnp.float32(0), parts)[0])

    arguments = (hidden, head, targets, weights, *teacher)
    total: jax.Array = per_device(local, _specs(chunks, teacher), PartitionSpec())(*arguments)
    return total


def _forward(
    hidden: jax.Array, head: Projection, targets: jax.Array, weights: jax.Array, teacher: Teacher, static: _Arguments
) -> tuple[jax.Array, tuple[jax.Array, Projection]]:
    chunks = static.chunks
    stored_vocab, stored_embed = (
        tuple(name for name in stored if name in chunks.rows) for stored in (static.stored_vocab, static.stored_embed)
    )
    elsewhere = tuple(name for name in chunks.rows if name not in stored_vocab + stored_embed)
    # the sums over parts of the vocabulary nearly cancel: in bfloat16, gradients would have twice the error
    partial_sum = jnp.float32 if chunks.vocab else hidden.dtype

    def local(hidden: jax.Array, head: Projection, targets: jax.Array, weights: jax.Array, *teacher: Any) -> Any:
        def chunk(sums: Any, part: Any) -> tuple[Any, jax.Array]:
            total, d_matrix, d_bias = sums
            rows, target, weight, *taught = part
            here = Chunk(chunks, chunks.logits(rows, head), head.matrix, target, (*taught, *teacher[1:]))
            losses, d_logits = static.loss.values_and_gradient(here, weight)
            d_logits = chunks.before_cap(d_logits, here.logits)
            d_logits = d_logits.astype(rows.dtype)
            if d_bias is not None:  # as a product: as a sum, XLA:GPU would write the gradients in float32 for it
                ones = jnp.ones(len(rows), rows.dtype)
                d_bias += jnp.einsum("TV,T->V", d_logits, ones, preferred_element_type=jnp.float32)
            d_matrix += jnp.einsum("TV,TD->VD", d_logits, rows, preferred_element_type=jnp.float32)
            d_rows = jnp.einsum("TV,VD->TD", d_logits, head.matrix, preferred_element_type=partial_sum)
            return (total + losses.sum(), d_matrix, d_bias), d_rows

        zeros = (jnp.float32(0), *jax.tree.map(lambda part: jnp.zeros(part.shape, jnp.float32), head))
        parts = tuple(map(chunks.cut, (hidden, targets, weights, *teacher[:1])))
        (total, d_matrix, d_bias), d_rows = jax.lax.scan(chunk, zeros, parts)
        d_matrix = scatter_sum(scatter_sum(d_matrix, stored_vocab, 0), stored_embed, 1)
        if d_bias is not None:
            d_bias = sum_over((*elsewhere, *stored_embed), scatter_sum(d_bias, stored_vocab, 0))
        d_hidden = scatter_sum(chunks.join(d_rows, hidden), chunks.gathered, 1)
        missing = tuple(name for name in chunks.vocab if name not in chunks.gathered)
        d_hidden = sum_over(missing, d_hidden).astype(hidden.dtype)
        return sum_over(chunks.rows, total), d_hidden, Projection(sum_over(elsewhere, d_matrix), d_bias)

    of_bias = None if head.bias is None else PartitionSpec(chunks.vocab + stored_vocab)
    gradients = (
        PartitionSpec(chunks.batch, chunks.positions),
        Projection(PartitionSpec(chunks.vocab + stored_vocab, stored_embed), of_bias),
    )
    function = per_device(local, _specs(chunks, teacher), (PartitionSpec(), *gradients))
    total, d_hidden, d_head = function(hidden, head, targets, weights, *teacher)
    return total, (d_hidden, jax.tree.map(lambda gradient, part: gradient.astype(part.dtype), d_head, head))


def _backward(static: _Arguments, gradients: tuple[jax.Array, Projection], upstream: jax.Array) -> tuple[Any, ...]:
    scaled = jax.tree.map(lambda gradient: (upstream * gradient).astype(gradient.dtype), gradients)
    return *scaled, None, None, None


_summed.defvjp(_forward, _backward)


def _specs(chunks: Chunks, teacher: Teacher) -> tuple[PartitionSpec, ...]:
    """The shardings of hidden states, head, targets, weights, and those of the teacher."""
    rows = chunks.of_rows
    return (rows, chunks.of_head, rows, rows, *(rows, chunks.of_head)[: len(teacher)])
