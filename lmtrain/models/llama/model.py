"""Llama and its near relatives: a stack of blocks with rotary positions, grouped keys and values, and a gated MLP.

Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models". The relatives are settings of the block:

    Llama     x += attn(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x)))
    Mistral   sliding_window: a query sees at most sliding_window keys
    Qwen2     use_qkv_bias: biases on queries, keys and values only
    Qwen3     qk_norm head: queries and keys are normalised within each head, before rotation
    Gemma     scale_embeddings, norm_offset: embeddings times sqrt(D), norms scale by 1 + w
    OLMo2     norm_position post, qk_norm all: norms follow attention and MLP; queries and keys over all heads at once

    B batch  S query position  T key position  D embed  H heads  K kv heads  C head dim  F mlp  V vocab  N layers

Initial values: matrices and embeddings normal(0, initializer_range); norms 1 (0 with norm_offset); biases 0.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.nn.initializers import normal

from lmtrain.models.interface import Documents, KvCache
from lmtrain.models.layers.activation import ACTIVATIONS
from lmtrain.models.layers.attention import attend, self_attend
from lmtrain.models.layers.head import logits_of
from lmtrain.models.layers.linear import Embed, Linear
from lmtrain.models.layers.norm import RmsNorm
from lmtrain.models.layers.remat import BLOCK_INPUT
from lmtrain.models.layers.rope import frequencies, magnitude, rotate
from lmtrain.models.layers.stack import stack
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.sharding.placement import constrain


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions and grouped key heads: [B, S, D] -> [B, S, D]."""

    config: LlamaConfig
    backend: str

    def setup(self) -> None:
        c = self.config
        init = normal(c.initializer_range)
        embed, head_dim = ("embed", c.hidden_dim), ("head_dim", c.head_width)
        heads, kv_heads = ("heads", c.num_heads), ("kv_heads", c.kv_heads)
        bias = c.use_bias or c.use_qkv_bias
        self.q = Linear((embed,), (heads, head_dim), init, bias)
        self.k = Linear((embed,), (kv_heads, head_dim), init, bias)
        self.v = Linear((embed,), (kv_heads, head_dim), init, bias)
        self.out = Linear((heads, head_dim), (embed,), init, c.use_bias)
        if c.qk_norm != "none":
            whole = c.qk_norm == "all"
            self.norm_q = RmsNorm((heads, head_dim) if whole else (head_dim,), c.layer_norm_epsilon, c.norm_offset)
            self.norm_k = RmsNorm((kv_heads, head_dim) if whole else (head_dim,), c.layer_norm_epsilon, c.norm_offset)
        self.frequency = frequencies(c.rope, c.head_width, c.seq_len)

    def __call__(self, x: jax.Array, documents: Documents) -> jax.Array:
        positions = jnp.arange(x.shape[1])[None] if documents.positions is None else documents.positions
        q, k, v = self._project(x, positions)
        c = self.config
        mixed = self_attend(
            self.backend,
            q,
            k,
            v,
            c.head_width**-0.5,
            segments_BS=documents.segments,
            window=c.sliding_window,
            block_size=c.flash_attention_block_size,
        )
        return self._merge(mixed)

    def extend(self, x: jax.Array, layer: jax.Array, cache: KvCache, start: jax.Array) -> tuple[jax.Array, KvCache]:
        """Attention of new positions `start, start + 1, ...` to all earlier ones and themselves."""
        q, k, v = self._project(x, jnp.reshape(start, (-1, 1)) + jnp.arange(x.shape[1]))
        cache = cache.write(k, v, start, layer)
        c = self.config
        mixed = attend(q, *cache.of_layer(layer), c.head_width**-0.5, first_query=start, window=c.sliding_window)
        return self._merge(mixed), cache

    def _project(self, x: jax.Array, positions_BS: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        # [B, S, H, C], [B, S, K, C] twice; without constraints, the compiler splits some of these products by position
        q = constrain(self.q(x), "act_batch", "act_seq", "act_heads", None)
        k, v = (constrain(part(x), "act_batch", "act_seq", "act_kv_heads", None) for part in (self.k, self.v))
        if self.config.qk_norm != "none":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (part.transpose(0, 2, 1, 3) for part in (q, k, v))
        scale = magnitude(self.config.rope)
        q, k = (rotate(part, positions_BS, self.frequency, scale) for part in (q, k))
        q = constrain(q, "act_batch", "act_heads", "act_seq", None)
        k, v = (constrain(part, "act_batch", "act_kv_heads", "act_seq", None) for part in (k, v))
        return q, k, v

    def _merge(self, mixed_BHSC: jax.Array) -> jax.Array:
        return self.out(mixed_BHSC.transpose(0, 2, 1, 3))


class LlamaMlp(nn.Module):
    """A gated MLP (SwiGLU): [B, S, D] -> [B, S, D]."""

    config: LlamaConfig

    def setup(self) -> None:
        c = self.config
        init = normal(c.initializer_range)
        embed, mlp = ("embed", c.hidden_dim), ("mlp", c.intermediate_dim)
        self.gate = Linear((embed,), (mlp,), init, c.use_mlp_bias)
        self.up = Linear((embed,), (mlp,), init, c.use_mlp_bias)
        self.down = Linear((mlp,), (embed,), init, c.use_mlp_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gated = ACTIVATIONS[self.config.activation_function](self.gate(x)) * self.up(x)
        return self.down(constrain(gated, "act_batch", "act_seq", "act_mlp"))


class LlamaBlock(nn.Module):
    """Attention and MLP, each with an RMS norm before or after it, added to the residual stream."""

    config: LlamaConfig
    backend: str

    def setup(self) -> None:
        c = self.config
        dims = (("embed", c.hidden_dim),)
        self.norm_attn = RmsNorm(dims, c.layer_norm_epsilon, c.norm_offset)
        self.attn = LlamaAttention(c, self.backend)
        self.norm_mlp = RmsNorm(dims, c.layer_norm_epsilon, c.norm_offset)
        self.mlp = LlamaMlp(c)

    def __call__(
        self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents
    ) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, BLOCK_INPUT)
        x = x + self._after(self.norm_attn, self.attn(self._before(self.norm_attn, x), documents))
        x = x + self._after(self.norm_mlp, self.mlp(self._before(self.norm_mlp, x)))
        return constrain(x, "act_batch", "act_stream", "act_embed"), None

    def extend(
        self, state: tuple[jax.Array, KvCache], layer: jax.Array, start: jax.Array
    ) -> tuple[tuple[jax.Array, KvCache], None]:
        x, cache = state
        mixed, cache = self.attn.extend(self._before(self.norm_attn, x), layer, cache, start)
        x = x + self._after(self.norm_attn, mixed)
        return (x + self._after(self.norm_mlp, self.mlp(self._before(self.norm_mlp, x))), cache), None

    def _before(self, norm: RmsNorm, x: jax.Array) -> jax.Array:
        return norm(x) if self.config.norm_position == "pre" else x

    def _after(self, norm: RmsNorm, x: jax.Array) -> jax.Array:
        return norm(x) if self.config.norm_position == "post" else x


class LlamaLM(nn.Module):
    """The language model. Its methods are documented in `lmtrain/models/interface.py`."""

    config: LlamaConfig
    vocab_size: int
    attention: str = "xla"

    def setup(self) -> None:
        c = self.config
        init = normal(c.initializer_range)
        self.tokens = Embed(("vocab", c.padded(self.vocab_size)), c.hidden_dim, init, c.tie_word_embeddings)
        self.blocks = stack(LlamaBlock, c.num_layers, c.scan_layers, c.gradient_checkpointing)(c, self.attention)
        self.norm_final = RmsNorm((("embed", c.hidden_dim),), c.layer_norm_epsilon, c.norm_offset)
        if not c.tie_word_embeddings:
            self.unembed = Embed(("vocab", c.padded(self.vocab_size)), c.hidden_dim, init, is_head=True)

    @property
    def has_dropout(self) -> bool:
        return False

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        return self.logits(self.hidden(tokens_BS, deterministic=True))

    def hidden(
        self,
        tokens_BS: jax.Array,
        deterministic: bool,
        segments_BS: jax.Array | None = None,
        positions_BS: jax.Array | None = None,
    ) -> jax.Array:
        x = constrain(self._embed(tokens_BS), "act_batch", "act_stream", "act_embed")
        documents = Documents(segments_BS, positions_BS)
        x, _ = self.blocks(x, jnp.arange(self.config.num_layers), deterministic, documents)
        return self.norm_final(x)

    def head(self) -> jax.Array:
        return (self.tokens if self.config.tie_word_embeddings else self.unembed).embedding

    def logits(self, hidden_BSD: jax.Array) -> jax.Array:
        return logits_of(hidden_BSD, self.head(), self.vocab_size)

    def empty_cache(self, batch: int, length: int) -> KvCache:
        c = self.config
        return KvCache.empty(c.num_layers, batch, c.kv_heads, length, c.head_width, self.head().dtype)

    def extend(self, tokens_BS: jax.Array, cache: KvCache, start: jax.Array) -> tuple[jax.Array, KvCache]:
        state = (self._embed(tokens_BS), cache)
        (x, cache), _ = self.blocks.extend(state, jnp.arange(self.config.num_layers), start)
        return self.logits(self.norm_final(x)), cache

    def _embed(self, tokens_BS: jax.Array) -> jax.Array:
        x = self.tokens(tokens_BS)
        return x * jnp.asarray(self.config.hidden_dim**0.5, x.dtype) if self.config.scale_embeddings else x
