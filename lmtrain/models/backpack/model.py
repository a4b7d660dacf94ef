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

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.nn.initializers import normal

from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.model import Gpt2Block
from lmtrain.models.interface import Documents, KvCache
from lmtrain.models.layers.activation import ACTIVATIONS
from lmtrain.models.layers.attention import attend, self_attend
from lmtrain.models.layers.head import logits_of
from lmtrain.models.layers.linear import Dims, Embed, Linear
from lmtrain.models.layers.norm import LayerNorm
from lmtrain.models.layers.stack import stack
from lmtrain.sharding.placement import constrain


class BackpackCache(struct.PyTreeNode):
    """Cache of the positions so far: the trunk's keys and values; sense keys [B, E, T, C] and vectors [B, E, T, D]."""

    trunk: KvCache
    senses: KvCache


class SenseMlp(nn.Module):
    """Two linear layers with the trunk's activation between them."""

    config: BackpackConfig
    width: int
    outputs: Dims
    spread: float

    def setup(self) -> None:
        c = self.config
        embed, mlp = ("embed", c.hidden_dim), ("mlp", self.width)
        self.up = Linear((embed,), (mlp,), normal(c.initializer_range), c.use_bias)
        self.down = Linear((mlp,), self.outputs, normal(self.spread), c.use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(self.up(x), "act_batch", "act_seq", "act_mlp")
        return self.down(ACTIVATIONS[self.config.activation_function](hidden))


class SenseNetwork(nn.Module):
    """Sense vectors of tokens: embeddings [B, S, D] -> [B, S, E, D]."""

    config: BackpackConfig

    def setup(self) -> None:
        c = self.config
        embed, spread = ("embed", c.hidden_dim), c.initializer_range
        self.norm_input, self.norm_mlp, self.norm_output = (
            LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias) for _ in range(3)
        )
        self.mlp = SenseMlp(c, c.mlp_dim, (embed,), spread / 2**0.5)
        inner = c.hidden_dim * c.sense_intermediate_scale
        self.to_senses = SenseMlp(c, inner, (("senses", c.num_senses), embed), spread)
        self.drop_embed = nn.Dropout(c.embed_pdrop)
        self.drop = nn.Dropout(c.resid_pdrop)

    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        x = self.drop_embed(x, deterministic=deterministic)
        x = x + self.drop(self.norm_input(x), deterministic=deterministic)  # the norm itself is added, as published
        x = x + self.drop(self.mlp(self.norm_mlp(x)), deterministic=deterministic)
        return self.to_senses(self.norm_output(x))


class BackpackLM(nn.Module):
    """The language model. Its methods are documented in `lmtrain/models/interface.py`."""

    config: BackpackConfig
    vocab_size: int
    attention: str = "xla"

    def setup(self) -> None:
        c = self.config
        init = normal(c.initializer_range)
        self.tokens = Embed(("vocab", c.padded(self.vocab_size)), c.hidden_dim, init, True)
        self.positions = Embed(("position", c.seq_len), c.hidden_dim, init)
        self.drop = nn.Dropout(c.embed_pdrop)
        self.blocks = stack(Gpt2Block, c.num_layers, c.scan_layers, c.gradient_checkpointing)(c, self.attention)
        self.norm_final = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.senses = SenseNetwork(c)
        weights = (("qkv", 2), ("senses", c.num_senses), ("head_dim", c.sense_width))
        self.weigh = Linear((("embed", c.hidden_dim),), weights, init, c.use_bias)
        self.drop_weights = nn.Dropout(c.attn_pdrop)

    @property
    def has_dropout(self) -> bool:
        return self.config.has_dropout

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        return self.logits(self.hidden(tokens_BS, deterministic=True))

    def hidden(
        self,
        tokens_BS: jax.Array,
        deterministic: bool,
        segments_BS: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
    ) -> jax.Array:
        embedded = self.tokens(tokens_BS)
        x = self.drop(self.positions.add_to(embedded, positions_BS), deterministic=deterministic)
        x = constrain(x, "act_batch", "act_stream", "act_embed")
        documents = Documents(segments_BS, positions_BS)
        x, _ = self.blocks(x, jnp.arange(self.config.num_layers), deterministic, documents)
        q, k = self._queries_and_keys(self.norm_final(x))
        drops = not deterministic and self.config.attn_pdrop > 0
        mixed_BESD = self_attend(
            self.attention,
            q,
            k,
            self._sense_vectors(embedded, deterministic),
            self.config.sense_width**-0.5,
            drop=(lambda weights: self.drop_weights(weights, deterministic=False)) if drops else None,
            segments_BS=segments_BS,
            block_size=self.config.flash_attention_block_size,
        )
        return self._add_up(mixed_BESD)

    def head(self) -> jax.Array:
        return self.tokens.embedding

    def logits(self, hidden_BSD: jax.Array) -> jax.Array:
        return logits_of(hidden_BSD, self.head(), self.vocab_size)

    def empty_cache(self, batch: int, length: int) -> BackpackCache:
        c = self.config
        dtype = self.head().dtype
        trunk = KvCache.empty(c.num_layers, batch, c.num_heads, length, c.head_width, dtype)
        shape = (batch, c.num_senses, length)
        senses = KvCache(jnp.zeros((*shape, c.sense_width), dtype), jnp.zeros((*shape, c.hidden_dim), dtype))
        return BackpackCache(trunk, senses)

    def extend(self, tokens_BS: jax.Array, cache: BackpackCache, start: jax.Array) -> tuple[jax.Array, BackpackCache]:
        embedded = self.tokens(tokens_BS)
        x = self.positions.add_from(embedded, start)
        (x, trunk), _ = self.blocks.extend((x, cache.trunk), jnp.arange(self.config.num_layers), start)
        q, k = self._queries_and_keys(self.norm_final(x))
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
