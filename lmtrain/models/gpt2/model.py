"""GPT-2: a stack of pre-norm blocks, each adding attention and then a GELU MLP to the residual stream.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Positions are learned; every linear layer
has a bias, unless use_bias is false; the head is tied to the embedding table, unless tie_word_embeddings is false.

    B batch  S query position  T key position  D embed  H heads  C head dim  F mlp  V vocab  N layers

Initial values (r = initializer_range, 0.02):

    embeddings, qkv, up       normal(0, r)
    out, down                 normal(0, r / sqrt(2 N)), since 2 N of them are summed in the residual stream
    biases                    0
    norms                     scale 1, bias 0
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal

from lmtrain.models.gpt2.config import Gpt2Config, Gpt2Settings
from lmtrain.models.interface import Documents, KvCache
from lmtrain.models.layers.activation import ACTIVATIONS
from lmtrain.models.layers.attention import attend, self_attend
from lmtrain.models.layers.head import logits_of
from lmtrain.models.layers.linear import Embed, Linear
from lmtrain.models.layers.norm import LayerNorm
from lmtrain.models.layers.remat import BLOCK_INPUT
from lmtrain.models.layers.stack import stack
from lmtrain.sharding.placement import constrain


class Gpt2Attention(nn.Module):
    """Causal attention of all heads: [B, S, D] -> [B, S, D]."""

    config: Gpt2Settings
    backend: str

    def setup(self) -> None:
        c = self.config
        embed, heads, head_dim = ("embed", c.hidden_dim), ("heads", c.num_heads), ("head_dim", c.head_width)
        residual = normal(c.initializer_range / (2 * c.num_layers) ** 0.5)
        self.qkv = Linear((embed,), (("qkv", 3), heads, head_dim), normal(c.initializer_range), c.use_bias)
        self.out = Linear((heads, head_dim), (embed,), residual, c.use_bias)
        self.drop_weights = nn.Dropout(c.attn_pdrop)

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, segments_BS: jax.Array | None) -> jax.Array:
        q, k, v = self._project(x)
        drop = None if deterministic else lambda weights: self.drop_weights(weights, deterministic=False)
        mixed = self_attend(
            self.backend,
            q,
            k,
            v,
            self._scale(layer),
            upcast=self.config.upcast_attn,
            drop=drop if self.config.attn_pdrop else None,
            segments_BS=segments_BS,
            block_size=self.config.flash_attention_block_size,
        )
        return self._merge(mixed)

    def extend(self, x: jax.Array, layer: jax.Array, cache: KvCache, start: jax.Array) -> tuple[jax.Array, KvCache]:
        """Attention of new positions `start, start + 1, ...` to all earlier ones and themselves."""
        q, k, v = self._project(x)
        cache = cache.write(k, v, start, layer)
        mixed = attend(q, *cache.of_layer(layer), self._scale(layer), first_query=start, upcast=self.config.upcast_attn)
        return self._merge(mixed), cache

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = constrain(self.qkv(x), "act_batch", "act_seq", None, "act_heads", None)  # [B, S, 3, H, C]
        q, k, v = (
            constrain(qkv[:, :, i].transpose(0, 2, 1, 3), "act_batch", "act_heads", "act_seq", None) for i in range(3)
        )
        return q, k, v

    def _merge(self, mixed_BHSC: jax.Array) -> jax.Array:
        return self.out(mixed_BHSC.transpose(0, 2, 1, 3))

    def _scale(self, layer: jax.Array) -> jax.Array | float:
        scale = self.config.head_width**-0.5
        return scale / (layer + 1) if self.config.scale_attn_by_inverse_layer_idx else scale


class Gpt2Mlp(nn.Module):
    """Two linear layers: [B, S, D] -> [B, S, D]."""

    config: Gpt2Settings

    def setup(self) -> None:
        c = self.config
        embed, mlp = ("embed", c.hidden_dim), ("mlp", c.mlp_dim)
        self.up = Linear((embed,), (mlp,), normal(c.initializer_range), c.use_bias)
        residual = normal(c.initializer_range / (2 * c.num_layers) ** 0.5)
        self.down = Linear((mlp,), (embed,), residual, c.use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(self.up(x), "act_batch", "act_seq", "act_mlp")
        return self.down(ACTIVATIONS[self.config.activation_function](hidden))


class Gpt2Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    config: Gpt2Settings
    backend: str

    def setup(self) -> None:
        c = self.config
        self.norm_attn = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.attn = Gpt2Attention(c, self.backend)
        self.norm_mlp = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.mlp = Gpt2Mlp(c)
        self.drop = nn.Dropout(c.resid_pdrop)

    def __call__(
        self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents
    ) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, BLOCK_INPUT)
        mixed = self.attn(self.norm_attn(x), layer, deterministic, documents.segments)
        x = x + self.drop(mixed, deterministic=deterministic)
        x = x + self.drop(self.mlp(self.norm_mlp(x)), deterministic=deterministic)
        return constrain(x, "act_batch", "act_stream", "act_embed"), None

    def extend(
        self, state: tuple[jax.Array, KvCache], layer: jax.Array, start: jax.Array
    ) -> tuple[tuple[jax.Array, KvCache], None]:
        x, cache = state
        mixed, cache = self.attn.extend(self.norm_attn(x), layer, cache, start)
        x = x + mixed
        return (x + self.mlp(self.norm_mlp(x)), cache), None


class Gpt2LM(nn.Module):
    """The language model. Its methods are documented in `lmtrain/models/interface.py`."""

    config: Gpt2Config
    vocab_size: int
    attention: str = "xla"

    def setup(self) -> None:
        c = self.config
        init = normal(c.initializer_range)
        self.tokens = Embed(("vocab", c.padded(self.vocab_size)), c.hidden_dim, init, c.tie_word_embeddings)
        self.positions = Embed(("position", c.seq_len), c.hidden_dim, init)
        self.drop = nn.Dropout(c.embed_pdrop)
        self.blocks = stack(Gpt2Block, c.num_layers, c.scan_layers, c.gradient_checkpointing)(c, self.attention)
        self.norm_final = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        if not c.tie_word_embeddings:
            self.unembed = Embed(("vocab", c.padded(self.vocab_size)), c.hidden_dim, init, is_head=True)

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
        x = self.positions.add_to(self.tokens(tokens_BS), positions_BS)
        x = constrain(self.drop(x, deterministic=deterministic), "act_batch", "act_stream", "act_embed")
        documents = Documents(segments_BS, positions_BS)
        x, _ = self.blocks(x, jnp.arange(self.config.num_layers), deterministic, documents)
        return self.norm_final(x)

    def head(self) -> jax.Array:
        return (self.tokens if self.config.tie_word_embeddings else self.unembed).embedding

    def logits(self, hidden_BSD: jax.Array) -> jax.Array:
        return logits_of(hidden_BSD, self.head(), self.vocab_size)

    def empty_cache(self, batch: int, length: int) -> KvCache:
        c = self.config
        return KvCache.empty(c.num_layers, batch, c.num_heads, length, c.head_width, self.head().dtype)

    def extend(self, tokens_BS: jax.Array, cache: KvCache, start: jax.Array) -> tuple[jax.Array, KvCache]:
        x = self.positions.add_from(self.tokens(tokens_BS), start)
        (x, cache), _ = self.blocks.extend((x, cache), jnp.arange(self.config.num_layers), start)
        return self.logits(self.norm_final(x)), cache
