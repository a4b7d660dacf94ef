"""Backpack: several sense vectors per token, weighted by the context.

Hewitt et al. 2023, "Backpack Language Models". A token has E sense vectors that depend only on the token; a
GPT-2 reads the context and gives, for each sense, attention weights over the positions so far. The output is the
weighted sum of sense vectors, and logits are its products with the embedding table, without a norm in between:

    sense_l(x)     = the l-th of E vectors made by an MLP from the embedding of x, without its position
    alpha[l, i, j] = softmax_j(q_l(c_i) k_l(c_j) / sqrt(D / E)) with c = GPT-2(x), j <= i
    o_i            = sum over l, j of alpha[l, i, j] sense_l(x_j), divided by E with divide_by_num_senses

    B batch  S query position  T key position  D embed  E senses  C width of a sense's query  F mlp  V vocab  N layers

Initial values: the trunk as in GPT-2; the sense network and the projections of sense weights normal(0, r), with
r / sqrt(2) for the last matrix of the sense network's block; biases 0; norms scale 1, bias 0.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.nn.initializers import normal

from lmtrain.models.attention.attend import attend
from lmtrain.models.attention.kernel import self_attend
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.cache import KvCache, StackCache
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.interface import NO_DOCUMENTS, Documents
from lmtrain.models.layers.block import active
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import LayerNorm, Mlp
from lmtrain.sharding.placement import constrain


class BackpackCache(struct.PyTreeNode):
    """Cache of the positions so far: the trunk's keys and values; sense keys [B, E, T, C] and vectors [B, E, T, D]."""

    trunk: StackCache
    senses: KvCache


class SenseNetwork(nn.Module):
    """Sense vectors of tokens: embeddings [B, S, D] -> [B, S, E, D]."""

    config: BackpackConfig

    def setup(self) -> None:
        c = self.config
        init, residual = normal(c.initializer_range), normal(c.initializer_range / 2**0.5)
        self.norm_input, self.norm_mlp, self.norm_output = (
            LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias) for _ in range(3)
        )
        self.mlp = Mlp(c.hidden_dim, c.mlp_dim, c.activation_function, init, residual, c.use_bias)
        inner, outputs = c.hidden_dim * c.sense_intermediate_scale, (("senses", c.num_senses), ("embed", c.hidden_dim))
        self.to_senses = Mlp(c.hidden_dim, inner, c.activation_function, init, init, c.use_bias, outputs=outputs)
        self.drop_embed = nn.Dropout(c.embed_pdrop)
        self.drop = nn.Dropout(c.resid_pdrop)

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = self.drop_embed(x, deterministic=deterministic)
        x = x + self.drop(self.norm_input(x), deterministic=deterministic)  # the norm itself is added, as published
        x = x + self.drop(self.mlp(self.norm_mlp(x)), deterministic=deterministic)
        return self.to_senses(self.norm_output(x))


class BackpackLM(Gpt2LM):
    """A GPT-2 whose outputs are the queries and keys of attention to the sense vectors."""

    config: BackpackConfig

    @property
    def is_tied(self) -> bool:
        return True

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.senses = SenseNetwork(c)
        weights = (("qkv", 2), ("senses", c.num_senses), ("head_dim", c.sense_width))
        self.weigh = Linear((("embed", c.hidden_dim),), weights, normal(c.initializer_range), c.use_bias)
        self.drop_weights = nn.Dropout(c.attn_pdrop)

    def hidden(self, tokens_BS: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS) -> jax.Array:
        embedded = self.embed(tokens_BS)
        q, k = self._queries_and_keys(self.read(embedded, deterministic, documents))
        mixed_BESD = self_attend(
            self.attention,
            q,
            k,
            self._sense_vectors(embedded, deterministic),
            self.config.sense_width**-0.5,
            drop=active(self.drop_weights, deterministic),
            segments=documents.segments,
            block_size=self.config.flash_attention_block_size,
        )
        return self._add_up(mixed_BESD)

    def empty_cache(self, batch: int, length: int) -> BackpackCache:
        c, dtype = self.config, self.head().dtype
        shape = (batch, c.num_senses, length)
        senses = KvCache(jnp.zeros((*shape, c.sense_width), dtype), jnp.zeros((*shape, c.hidden_dim), dtype))
        return BackpackCache(super().empty_cache(batch, length), senses)

    def extend(
        self, tokens_BS: jax.Array, cache: BackpackCache, start: jax.Array, count: Any = None
    ) -> tuple[jax.Array, BackpackCache]:
        embedded = self.embed(tokens_BS)
        context, trunk = self.read_more(embedded, cache.trunk, start, count)
        q, k = self._queries_and_keys(context)
        senses = cache.senses.write(k, self._sense_vectors(embedded, deterministic=True), start)
        mixed = attend(q, senses.k, senses.v, self.config.sense_width**-0.5, start)
        return self.logits(self._add_up(mixed)), BackpackCache(trunk, senses)

    def _sense_vectors(self, embedded_BSD: jax.Array, deterministic: bool) -> jax.Array:
        vectors = self.senses(embedded_BSD, deterministic).transpose(0, 2, 1, 3)
        return constrain(vectors, "act_batch", "act_senses", "act_seq", "act_embed")

    def _queries_and_keys(self, context_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        both = self.weigh(context_BSD).transpose(2, 0, 3, 1, 4)  # [2, B, E, S, C]
        q, k = (constrain(part, "act_batch", "act_senses", "act_seq", None) for part in both)
        return q, k

    def _add_up(self, mixed_BESD: jax.Array) -> jax.Array:
        total = mixed_BESD.sum(1)
        total = total / self.config.num_senses if self.config.divide_by_num_senses else total
        return constrain(total, "act_batch", "act_stream", "act_embed")
