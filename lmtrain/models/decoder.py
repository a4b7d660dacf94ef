"""The language model of every family: embeddings, a stack of blocks, a final norm and a head.

A family is its block, its config and its table of weight names (`README.md`).

    B batch  S query position  D embed  V vocab  N layers
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from lmtrain.models.attention.names import PLAIN
from lmtrain.models.cache import StackCache
from lmtrain.models.interface import NO_DOCUMENTS, Documents, LogitCap, Outputs
from lmtrain.models.layers.linear import Embed
from lmtrain.models.layers.stack import Pattern, layers_of_modules, stack
from lmtrain.sharding.placement import constrain


class Decoder(nn.Module):
    """A decoder-only language model. Its methods are documented in `lmtrain/models/interface.py`.

    A family is a subclass with its `block` and `build_norm`, and where it differs the other settings and methods above
    `setup`. `attention` is a backend that supports the config.
    """

    config: Any
    vocab_size: int
    attention: str = PLAIN

    block: ClassVar[type[nn.Module]]
    has_learned_positions: ClassVar[bool] = False

    def build_norm(self) -> nn.Module:
        """The norm before the head."""
        raise NotImplementedError

    @property
    def embedding_scale(self) -> float:
        """Factor of the token embeddings."""
        return 1.0

    @property
    def embedding_dropout(self) -> float:
        """Dropout rate after the embeddings."""
        return 0.0

    @property
    def pattern(self) -> Pattern:
        """The configs of the blocks: several if layers differ."""
        return Pattern((), (self.config,))

    @property
    def is_tied(self) -> bool:
        """Whether the table of tokens is also the head."""
        tied: bool = self.config.tie_word_embeddings
        return tied

    @property
    def forgets(self) -> bool:
        return any(mixer.forgets for mixer in self.config.mixers)

    @property
    def logit_cap(self) -> LogitCap | None:
        return None

    @property
    def has_head_bias(self) -> bool:
        """Whether logits have a bias."""
        return False

    @property
    def has_embedding_norm(self) -> bool:
        """Whether a norm follows the embeddings."""
        return False

    @property
    def has_dropout(self) -> bool:
        has_dropout: bool = self.config.has_dropout
        return has_dropout

    def layers_of_modules(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        found = layers_of_modules(self.block, self._blocks, c.num_layers, c.hidden_dim)
        return {f"blocks/{path}": layers for path, layers in found.items()}

    @property
    def _blocks(self) -> Pattern:
        """The arguments of the blocks."""
        return Pattern(*(tuple((config, self.attention) for config in part) for part in self.pattern))

    def setup(self) -> None:
        c = self.config
        entries, init = ("vocab", c.padded(self.vocab_size)), normal(c.initial_range(c.hidden_dim))
        self.tokens = Embed(
            entries, c.hidden_dim, init, is_head=self.is_tied, has_bias=self.is_tied and self.has_head_bias
        )
        if self.has_embedding_norm:
            self.norm_tokens = self.build_norm()
        if self.has_learned_positions:
            self.positions = Embed(("position", c.seq_len), c.hidden_dim, init)
        self.drop = nn.Dropout(self.embedding_dropout)
        self.blocks = stack(self.block, self._blocks, c.num_layers, c.scan_layers, c.gradient_checkpointing)
        self.norm_final = self.build_norm()
        if not self.is_tied:
            self.unembed = Embed(entries, c.hidden_dim, init, is_head=True, has_bias=self.has_head_bias)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        hidden = self.hidden(tokens_BS, deterministic=True)
        if self.is_initializing():  # their parameters exist, too
            self.further_outputs(hidden, tokens_BS, True, NO_DOCUMENTS)
        return self.logits(hidden)

    def hidden(self, tokens_BS: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        return self.read(self.embed(tokens_BS), deterministic, documents)

    def further_outputs(
        self, hidden_BSD: jax.Array, tokens_BS: jax.Array, deterministic: bool, documents: Documents
    ) -> Outputs:
        return {}

    def head(self) -> jax.Array:
        return (self.tokens if self.is_tied else self.unembed).embedding

    def head_bias(self) -> jax.Array | None:
        table = self.tokens if self.is_tied else self.unembed
        return table.bias if self.has_head_bias else None

    def logits(self, hidden_BSD: jax.Array) -> jax.Array:
        """Float32 logits [B, S, vocab_size]."""
        logits = jnp.einsum("BSD,VD->BSV", hidden_BSD, self.head())[..., : self.vocab_size].astype(jnp.float32)
        if (bias := self.head_bias()) is not None:
            logits += bias[: self.vocab_size].astype(jnp.float32)
        return logits if self.logit_cap is None else self.logit_cap(logits)

    def empty_cache(self, batch: int, length: int) -> Any:
        return StackCache.empty(self.config.mixers, batch, length, self.head().dtype)

    def extend(self, tokens_BS: jax.Array, cache: Any, start: jax.Array, count: Any = None) -> tuple[jax.Array, Any]:
        hidden, cache = self.read_more(self.embed(tokens_BS), cache, start, count)
        return self.logits(hidden), cache

    def embed(self, tokens_BS: jax.Array) -> jax.Array:
        """The embeddings of tokens, without positions, [B, S, D]."""
        x = self.tokens(tokens_BS)
        x = x if self.embedding_scale == 1 else x * jnp.asarray(self.embedding_scale, x.dtype)
        return self.norm_tokens(x) if self.has_embedding_norm else x

    def read(self, x: jax.Array, deterministic: bool, documents: Documents) -> jax.Array:
        """Embeddings [B, S, D] -> the outputs of the stack, normalized."""
        if self.has_learned_positions:
            x = self.positions.add_to(x, documents.positions)
        x = constrain(self.drop(x, deterministic=deterministic), "act_batch", "act_stream", "act_embed")
        x, _ = self.blocks(x, jnp.arange(self.config.num_layers), deterministic, documents)
        return self.norm_final(x)

    def read_more(
        self, x: jax.Array, cache: StackCache, start: jax.Array, count: Any = None
    ) -> tuple[jax.Array, StackCache]:
        """`read` of new positions `start, start + 1, ...`, and the updated cache of the stack."""
        if self.has_learned_positions:
            x = self.positions.add_from(x, start)
        (x, cache), _ = self.blocks.extend((x, cache), jnp.arange(self.config.num_layers), start, count)
        return self.norm_final(x), cache
