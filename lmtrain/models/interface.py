"""The interface of every language model: training, evaluation and sampling use only this."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct


class KvCache(struct.PyTreeNode):
    """Keys and values of the positions so far, each [N, B, H, T, C] for a stack of blocks, or [B, H, T, C]."""

    k: jax.Array
    v: jax.Array

    def write(
        self, k_BHSC: jax.Array, v_BHSC: jax.Array, start: jax.Array, layer: jax.Array | None = None
    ) -> "KvCache":
        """The cache with the new positions `start, start + 1, ...` filled in, of one `layer` of a stack.

        `start` is a scalar, or [B] for sequences of different lengths.
        """
        if jnp.ndim(start):
            return self._write_each(k_BHSC, v_BHSC, start, layer)
        at: tuple[jax.Array | int, ...] = (0, 0, start, 0)
        if layer is not None:
            at, k_BHSC, v_BHSC = (layer, *at), k_BHSC[None], v_BHSC[None]
        return KvCache(
            jax.lax.dynamic_update_slice(self.k, k_BHSC, at), jax.lax.dynamic_update_slice(self.v, v_BHSC, at)
        )

    def _write_each(
        self, k_BHSC: jax.Array, v_BHSC: jax.Array, start_B: jax.Array, layer: jax.Array | None
    ) -> "KvCache":
        """`write` with another start for each sequence."""
        rows = jnp.arange(len(start_B))[:, None]
        positions = start_B[:, None] + jnp.arange(k_BHSC.shape[2])
        at = (rows, slice(None), positions) if layer is None else (layer, rows, slice(None), positions)
        k, v = (new.transpose(0, 2, 1, 3) for new in (k_BHSC, v_BHSC))
        return KvCache(self.k.at[at].set(k), self.v.at[at].set(v))

    def of_layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer of a stack, [B, H, T, C] each."""
        k, v = (jax.lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in (self.k, self.v))
        return k, v


class Documents(NamedTuple):
    """Documents packed into sequences; None where nothing depends on them.

    `segments` [B, S]: tokens attend only to those of their own segment. `positions` [B, S] are the tokens' positions
    within their documents; None: positions within the sequence.
    """

    segments: jax.Array | None = None
    positions: jax.Array | None = None


NO_DOCUMENTS = Documents()


class LanguageModel(Protocol):
    """A Linen module with these methods, called through `apply(..., method=...)`."""

    vocab_size: int

    def __hash__(self) -> int:
        """Linen's hash: equal modules are equal keys."""

    @property
    def has_dropout(self) -> bool:
        """Whether training needs a `dropout` key."""

    def init(self, key: jax.Array, tokens_BS: jax.Array) -> Any:
        """Linen's init: new variables, boxed with their logical names."""

    def apply(self, variables: Any, *arguments: Any, **keywords: Any) -> Any:
        """Linen's apply: call the method named by `method`."""

    def clone(self, **changes: Any) -> "LanguageModel":
        """Linen's clone: the same module with other fields, such as `attention`, the name of its backend."""

    def hidden(self, tokens_BS: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        """Hidden states [B, S, D], the input of the head. Needs a `dropout` key unless deterministic."""

    def head(self) -> jax.Array:
        """The head's matrix, [V, D]: logits are `hidden @ head.T`. Rows from `vocab_size` on are padding."""

    def empty_cache(self, batch: int, length: int) -> Any:
        """A cache for `length` positions, in the type of the parameters: a tree of arrays, specific to the family."""

    def extend(self, tokens_BS: jax.Array, cache: Any, start: jax.Array) -> tuple[jax.Array, Any]:
        """Float32 logits [B, S, V] of new tokens at positions `start, start + 1, ...`, and the updated cache.

        `start` is a scalar, or [B] for sequences of different lengths.
        """


def hidden_and_head(
    model: LanguageModel, batch: Mapping[str, jax.Array], deterministic: bool
) -> tuple[jax.Array, jax.Array]:
    """Hidden states and head in one `apply(..., method=hidden_and_head)`, so that a tied table is gathered once.
    For `batch` see `lmtrain/data/batches.py`."""
    documents = Documents(batch.get("segments"), batch.get("positions"))
    return model.hidden(batch["tokens"], deterministic, documents), model.head()
