"""Logits in chunks of rows, on each device for its own rows: never for the entire batch at once.

A row is a position of a sequence. The head is gathered once, before the loop over the chunks. If the vocabulary is
split over devices (tensor parallelism), a device computes the logits of its part of the vocabulary, for the rows of all
devices that share the vocabulary with it.

    T rows of a chunk  D embed  V vocab (a device's part of it)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lmtrain.sharding.local import num_parts, per_device, platform, split_over, sum_over
from lmtrain.sharding.placement import stream_axes

# Number of logits that a device holds at once. Each chunk reads the head and adds to its float32 gradient: with few
# rows that is most of the memory traffic. A CPU is fastest with chunks that fit in its caches.
_LOGITS_AT_ONCE = {"cpu": 2**22, "gpu": 2**27, "tpu": 2**27}
_MIN_ROWS = {"cpu": 64, "gpu": 1024, "tpu": 1024}

# If the rows do not divide evenly, chunk sizes are multiples of this, which matches the hardware's tiles.
_TILE = 128

# Far below any logit, and finite: its exponential is 0, and so is its gradient.
_NO_TOKEN = -1e30


class Chunks(NamedTuple):
    """The split of rows and head over devices, as mesh axes, and of a device's rows into chunks.

    `positions` are split outside the per-device function; inside, they are gathered along the axes of `vocab`. The
    head's rows from `vocab_size` on are padding. Logits are `cap * tanh(logits / cap)` if there is a `cap`.
    """

    batch: tuple[str, ...]
    positions: tuple[str, ...]
    vocab: tuple[str, ...]
    size: int
    vocab_size: int
    padded_size: int
    cap: float | None

    @classmethod
    def of(
        cls,
        hidden_BSD: jax.Array,
        head_VD: jax.Array,
        vocab_size: int | None,
        cap: float | None = None,
        arrays: int = 1,
    ) -> "Chunks":
        """The split in the program being traced, for these global arrays; `arrays` of logits are in memory at once."""
        batch, positions, vocab = split_over("act_batch"), stream_axes(hidden_BSD.shape[1]), split_over("act_vocab")
        entries = head_VD.shape[0]
        chunks = cls(batch, positions, vocab, 0, vocab_size or entries, entries, cap)
        rows = hidden_BSD.shape[0] * hidden_BSD.shape[1] // num_parts(chunks.rows)
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
        """The sharding of the head inside."""
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

    def map_rows(
        self, function: Callable[..., Any], hidden_BSD: jax.Array, head_VD: jax.Array, *arrays_BS: jax.Array
    ) -> Any:
        """`function(logits [T, V], head, rows of each array [T])` of each chunk -> a tree of results, [B, S] each."""

        def local(hidden: jax.Array, head: jax.Array, *arrays: jax.Array) -> Any:
            def chunk(_: None, part: tuple[jax.Array, ...]) -> tuple[None, Any]:
                return None, function(self.logits(part[0], head), head, *part[1:])

            _, results = jax.lax.scan(chunk, None, tuple(map(self.cut, (hidden, *arrays))))
            return jax.tree.map(lambda result: self.join(result, hidden), results)

        rows = self.of_rows
        specs = (rows, self.of_head, *(rows for _ in arrays_BS))
        return per_device(local, specs, rows)(hidden_BSD, head_VD, *arrays_BS)

    def first_token(self, head_VD: jax.Array) -> jax.Array | int:
        """The id of the first token in this device's part of the vocabulary."""
        return jax.lax.axis_index(self.vocab) * len(head_VD) if self.vocab else 0

    def is_token(self, head_VD: jax.Array) -> jax.Array:
        """[V] Which entries of this device's part of the vocabulary are tokens, not padding."""
        return self.first_token(head_VD) + jnp.arange(len(head_VD)) < self.vocab_size

    def logits(self, rows_TD: jax.Array, head_VD: jax.Array) -> jax.Array:
        """Float32 logits [T, V] of this device's part of the vocabulary; padding has a very low logit."""
        logits = jnp.einsum("TD,VD->TV", rows_TD, head_VD).astype(jnp.float32)
        if self.cap is not None:
            logits = self.cap * jnp.tanh(logits / self.cap)
        if self.vocab_size == self.padded_size:
            return logits
        return jnp.where(self.is_token(head_VD), logits, _NO_TOKEN)

    def before_cap(self, d_logits_TV: jax.Array, logits_TV: jax.Array) -> jax.Array:
        """The gradient with respect to the products with the head; that of padding is 0."""
        if self.cap is None:
            return d_logits_TV
        return d_logits_TV * (1 - jnp.square(jnp.maximum(logits_TV / self.cap, -1)))

    def log_sum(self, logits_TV: jax.Array) -> jax.Array:
        """The log-sum-exp over the entire vocabulary, [T]."""
        highest = jax.lax.stop_gradient(logits_TV.max(-1))
        if self.vocab:
            highest = jax.lax.pmax(highest, self.vocab)
        return highest + jnp.log(sum_over(self.vocab, jnp.exp(logits_TV - highest[:, None]).sum(-1)))

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


def rows_at_once(rows: int, vocab: int, kind: str) -> int:
    """Rows per chunk, for a device of platform `kind` with `rows` rows and `vocab` entries of the vocabulary."""
    limit = min(max(_LOGITS_AT_ONCE[kind] // vocab, _MIN_ROWS[kind]), rows)
    min_chunks = -(-rows // limit)
    for chunks in range(min_chunks, 2 * min_chunks):
        if rows % chunks == 0:
            return rows // chunks
    even = -(-rows // min_chunks)
    return -(-even // _TILE) * _TILE if even > _TILE else even
