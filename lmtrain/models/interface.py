"""The interface of every language model: training, evaluation and sampling use only this."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct


class Documents(NamedTuple):
    """Documents packed into sequences; None where nothing depends on them.

    `segments` [B, S]: tokens attend only to those of their own segment. `positions` [B, S] are the tokens' positions
    within their documents; None: positions within the sequence. `used` [B, S]: whether a token or one after it in its
    sequence has a target, so that it can change the loss; None: all can.
    """

    segments: jax.Array | None = None
    positions: jax.Array | None = None
    used: jax.Array | None = None


NO_DOCUMENTS = Documents()


class LogitCap(NamedTuple):
    """A cap on logits l to `limit` c: c tanh(l / c) (Gemma 2), or c l / sqrt(l^2 + c^2) (modded-nanogpt)."""

    limit: float
    kind: Literal["tanh", "rsqrt"] = "tanh"

    def __call__(self, logits: jax.Array) -> jax.Array:
        if self.kind == "tanh":
            return self.limit * jnp.tanh(logits / self.limit)
        return self.limit * logits * jax.lax.rsqrt(jnp.square(logits) + self.limit**2)

    def slope(self, capped: jax.Array) -> jax.Array:
        """The derivative, from the value with the cap; 0 for values below the cap, which are no logits."""
        rest = 1 - jnp.square(jnp.maximum(capped / self.limit, -1))
        return rest if self.kind == "tanh" else rest * jnp.sqrt(rest)


class LanguageModel(Protocol):
    """A Linen module with these methods, called through `apply(..., method=...)`."""

    vocab_size: int

    def __hash__(self) -> int:
        """Linen's hash: equal modules are equal keys."""

    @property
    def forgets(self) -> bool:
        """Whether the cache forgets positions, so that it cannot go back to an earlier one."""

    @property
    def logit_cap(self) -> LogitCap | None:
        """The cap on logits, if there is one."""

    @property
    def has_dropout(self) -> bool:
        """Whether training needs a `dropout` key."""

    def layers_of_modules(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the layers that have each module of a stack, by its path; empty if all have all."""

    def init(self, key: jax.Array, tokens_BS: jax.Array) -> Any:
        """Linen's init: new variables, boxed with their logical names."""

    def apply(self, variables: Any, *arguments: Any, **keywords: Any) -> Any:
        """Linen's apply: call the method named by `method`."""

    def clone(self, **changes: Any) -> "LanguageModel":
        """Linen's clone: the same module with other fields, such as `attention`, the name of its backend."""

    def hidden(self, tokens_BS: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        """Hidden states [B, S, D], the input of the head. Needs a `dropout` key unless deterministic."""

    def further_outputs(
        self, hidden_BSD: jax.Array, tokens_BS: jax.Array, deterministic: bool, documents: Documents
    ) -> "Outputs":
        """Outputs besides `MAIN`, from its hidden states; each has a loss (`further_losses` of the config)."""

    def head(self) -> jax.Array:
        """The head's matrix, [V, D]: logits are `hidden @ head.T + head_bias`, before `logit_cap`. Rows from
        `vocab_size` on are padding."""

    def head_bias(self) -> jax.Array | None:
        """The bias of the logits, [V]; None: there is none."""

    def empty_cache(self, batch: int, length: int) -> Any:
        """A cache for `length` positions, in the type of the parameters: a tree of arrays, specific to the family."""

    def extend(self, tokens_BS: jax.Array, cache: Any, start: jax.Array, count: Any = None) -> tuple[jax.Array, Any]:
        """Float32 logits [B, S, V] of new tokens at positions `start, start + 1, ...`, and the updated cache.

        Only the first `count` tokens of a row enter the cache, all by default; the rest is padding. Where the
        cache `forgets`, `start` is the number of tokens that the row has in the cache, or one less: its
        last token may be read again. `start` and `count` are scalars, or [B] for sequences of different lengths.
        """


class Head(struct.PyTreeNode):
    """An output of a model, from which logits follow: hidden states [B, S, D] and the head's matrix [V, D].

    Logits are `hidden @ matrix.T`, plus the `bias` [V] and below the `cap` if there are; rows of the matrix from
    `vocab_size` on are padding, None: there are none.
    """

    hidden: jax.Array
    matrix: jax.Array
    vocab_size: int | None = struct.field(pytree_node=False, default=None)
    cap: LogitCap | None = struct.field(pytree_node=False, default=None)
    bias: jax.Array | None = None


# The output that evaluation, sampling and most objectives read: the next token of each position.
MAIN = "next_token"

# The outputs of a model by name.
Outputs = Mapping[str, Head]


def outputs_of(model: LanguageModel, batch: Mapping[str, jax.Array], deterministic: bool) -> Outputs:
    """The outputs of a model in one `apply(..., method=outputs_of)`, so that a tied table is gathered once. For `batch`
    see `lmtrain/data/batches.py`."""
    mask = batch.get("loss_mask")
    used = None if mask is None else jax.lax.cummax(mask.astype(jnp.int32), axis=1, reverse=True) > 0
    documents = Documents(batch.get("segments"), batch.get("positions"), used)
    hidden = model.hidden(batch["tokens"], deterministic, documents)
    main = Head(hidden, model.head(), model.vocab_size, model.logit_cap, model.head_bias())
    return {MAIN: main, **model.further_outputs(hidden, batch["tokens"], deterministic, documents)}
