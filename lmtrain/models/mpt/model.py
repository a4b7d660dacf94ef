"""MPT: pre-norm blocks without biases, with positions as a bias of attention that grows with the distance.

MosaicML 2023, "Introducing MPT-7B"; the bias is ALiBi (Press et al. 2022), which needs no position embeddings and so
does not limit the length.

    x += out(attn(norm_attn(x)));  x += down(gelu(up(norm_mlp(x))))
    scores = q k^T / sqrt(C) + slope_h (key position - query position)

    B batch  S query position  T key position  D embed  H heads  C head dim  F mlp  V vocab  N layers

Initial values (init_scheme kaiming; He et al. 2015 for each matrix by its inputs):

    embedding, qkv, up        normal(0, sqrt(2 / inputs)); the embedding counts D inputs
    out, down                 the same / sqrt(2 N), since 2 N of them are summed in the residual stream
    biases, if any            0
    norms                     scale 1, bias 0

With init_scheme normal, initializer_range replaces sqrt(2 / inputs).
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import Initializer, normal

from lmtrain.models.interface import Documents, KvCache
from lmtrain.models.layers.activation import ACTIVATIONS
from lmtrain.models.layers.attention import alibi_slopes, attend, self_attend
from lmtrain.models.layers.head import logits_of
from lmtrain.models.layers.linear import Embed, Linear
from lmtrain.models.layers.norm import LayerNorm
from lmtrain.models.layers.remat import BLOCK_INPUT
from lmtrain.models.layers.stack import stack
from lmtrain.models.mpt.config import MptConfig
from lmtrain.sharding.placement import constrain


def initial(config: MptConfig, inputs: int, residual: bool = False) -> Initializer:
    """The initializer of a matrix with this number of inputs; `residual` for those that add to the stream."""
    spread: float = config.initializer_range if config.init_scheme == "normal" else (2 / inputs) ** 0.5
    return normal(spread / (2 * config.num_layers) ** 0.5 if residual else spread)


class MptAttention(nn.Module):
    """Causal attention with distances (ALiBi) or learned positions: [B, S, D] -> [B, S, D]."""

    config: MptConfig
    backend: str

    def setup(self) -> None:
        c = self.config
        embed, heads, head_dim = ("embed", c.hidden_dim), ("heads", c.num_heads), ("head_dim", c.head_width)
        self.qkv = Linear((embed,), (("qkv", 3), heads, head_dim), initial(c, c.hidden_dim), c.use_bias)
        self.out = Linear((heads, head_dim), (embed,), initial(c, c.hidden_dim, residual=True), c.use_bias)
        self.drop_weights = nn.Dropout(c.attn_pdrop)
        self.slopes = alibi_slopes(c.num_heads, c.alibi_bias_max)
        self.scale = c.softmax_scale or c.head_width**-0.5

    def __call__(self, x: jax.Array, deterministic: bool, segments_BS: jax.Array | None) -> jax.Array:
        q, k, v = self._project(x)
        drops = not deterministic and self.config.attn_pdrop > 0
        mixed = self_attend(
            self.backend,
            q,
            k,
            v,
            self.scale,
            drop=(lambda weights: self.drop_weights(weights, deterministic=False)) if drops else None,
            segments_BS=segments_BS,
            slopes=self.slopes,
            block_size=self.config.flash_attention_block_size,
        )
        return self._merge(mixed)

    def extend(self, x: jax.Array, layer: jax.Array, cache: KvCache, start: jax.Array) -> tuple[jax.Array, KvCache]:
        """Attention of new positions `start, start + 1, ...` to all earlier ones and themselves."""
        q, k, v = self._project(x)
        cache = cache.write(k, v, start, layer)
        return self._merge(attend(q, *cache.of_layer(layer), self.scale, start, slopes=self.slopes)), cache

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = constrain(self.qkv(x), "act_batch", "act_seq", None, "act_heads", None)  # [B, S, 3, H, C]
        if self.config.clip_qkv is not None:
            qkv = jnp.clip(qkv, -self.config.clip_qkv, self.config.clip_qkv)
        q, k, v = (
            constrain(qkv[:, :, i].transpose(0, 2, 1, 3), "act_batch", "act_heads", "act_seq", None) for i in range(3)
        )
        return q, k, v

    def _merge(self, mixed_BHSC: jax.Array) -> jax.Array:
        return self.out(mixed_BHSC.transpose(0, 2, 1, 3))


class MptMlp(nn.Module):
    """Two linear layers: [B, S, D] -> [B, S, D]."""

    config: MptConfig

    def setup(self) -> None:
        c = self.config
        embed, mlp = ("embed", c.hidden_dim), ("mlp", c.hidden_dim * c.mlp_scale)
        self.up = Linear((embed,), (mlp,), initial(c, c.hidden_dim), c.use_bias)
        self.down = Linear((mlp,), (embed,), initial(c, c.hidden_dim * c.mlp_scale, residual=True), c.use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(ACTIVATIONS["gelu"](constrain(self.up(x), "act_batch", "act_seq", "act_mlp")))


class MptBlock(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    config: MptConfig
    backend: str

    def setup(self) -> None:
        c = self.config
        self.norm_attn = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.attn = MptAttention(c, self.backend)
        self.norm_mlp = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        self.mlp = MptMlp(c)
        self.drop = nn.Dropout(c.resid_pdrop)

    def __call__(
        self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents
    ) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, BLOCK_INPUT)
        x = x + self.drop(self.attn(self.norm_attn(x), deterministic, documents.segments), deterministic=deterministic)
        x = x + self.drop(self.mlp(self.norm_mlp(x)), deterministic=deterministic)
        return constrain(x, "act_batch", "act_stream", "act_embed"), None

    def extend(
        self, state: tuple[jax.Array, KvCache], layer: jax.Array, start: jax.Array
    ) -> tuple[tuple[jax.Array, KvCache], None]:
        x, cache = state
        mixed, cache = self.attn.extend(self.norm_attn(x), layer, cache, start)
        x = x + mixed
        return (x + self.mlp(self.norm_mlp(x)), cache), None


class MptLM(nn.Module):
    """The language model. Its methods are documented in `lmtrain/models/interface.py`."""

    config: MptConfig
    vocab_size: int
    attention: str = "xla"

    def setup(self) -> None:
        c = self.config
        init, entries = initial(c, c.hidden_dim), ("vocab", c.padded(self.vocab_size))
        self.tokens = Embed(entries, c.hidden_dim, init, c.tie_word_embeddings)
        self.drop = nn.Dropout(c.embed_pdrop)
        self.blocks = stack(MptBlock, c.num_layers, c.scan_layers, c.gradient_checkpointing)(c, self.attention)
        self.norm_final = LayerNorm(c.hidden_dim, c.layer_norm_epsilon, c.use_bias)
        if not c.tie_word_embeddings:
            self.unembed = Embed(entries, c.hidden_dim, init, is_head=True)

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
        x = self.drop(self.tokens(tokens_BS), deterministic=deterministic)
        x = constrain(x, "act_batch", "act_stream", "act_embed")
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
        state = (self.tokens(tokens_BS), cache)
        (x, cache), _ = self.blocks.extend(state, jnp.arange(self.config.num_layers), start)
        return self.logits(self.norm_final(x)), cache
