"""Llama and its near relatives: a stack of blocks with rotary positions, grouped keys and values, and a gated MLP.

Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models". The relatives are settings of the block:

    Llama     x += attn(norm(x)); x += down(silu(gate(norm(x))) * up(norm(x)))
    Mistral   sliding_window: a query sees at most sliding_window keys
    Qwen2     use_qkv_bias: biases on queries, keys and values only
    Qwen3     qk_norm head: queries and keys are normalised within each head, before rotation
    Gemma     scale_embeddings, norm_offset: embeddings times sqrt(D), norms scale by 1 + w
    OLMo2     norm_position post, qk_norm all: norms follow attention and MLP; queries and keys over all heads at once
    OLMo3     OLMo2 with layer_pattern: three sliding layers, whose RoPE is not scaled, before a full one
    Gemma2    norm_position both, capped scores and logits, every second layer sliding
    Gemma3    Gemma2 without caps, qk_norm head, five sliding layers with rope.local_theta before a full one
    SmolLM3   layer_pattern: every fourth layer without RoPE
    gpt-oss   attention_sinks: a learned score for each head in the softmax, which lowers the weights of all keys
    Arcee     gated_mlp false, activation_function relu2
    hybrids   layer_pattern with linear layers: Gated DeltaNet in place of attention. Qwen3.5: qk_norm head,
              norm_offset, attention_gate, rope.partial_rotary_factor; Qwen3-Next: also moe with shared_gate;
              OLMo Hybrid: OLMo2 without RoPE, norm_position pre in linear layers, linear_attention.negative_eigenvalues
    DeepSeek  latent_attention; moe with shared_experts, first_dense_layers and groups; V3: router sigmoid, and mtp
    Mixtral   moe: a mixture of experts in place of the MLP; Qwen3-MoE, with qk_norm head; OLMoE, with qk_norm all

    B batch  S query position  T key position  D embed  H heads  K kv heads  C head dim  F mlp  V vocab  N layers

Initial values: matrices and embeddings normal(0, initializer_range); norms 1 (0 with norm_offset); biases 0.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from lmtrain.models.cache import StackCache
from lmtrain.models.decoder import Decoder
from lmtrain.models.gated_delta.layer import GatedDelta
from lmtrain.models.interface import NO_DOCUMENTS, Documents, Head, LogitCap, Outputs
from lmtrain.models.latent.layer import LatentAttention
from lmtrain.models.layers.block import Attention, Block, Projected, TokenMixer
from lmtrain.models.layers.linear import Linear, declare, sizes
from lmtrain.models.layers.mlp import Mlp, RmsNorm
from lmtrain.models.layers.rope import frequencies, rotate
from lmtrain.models.layers.stack import Pattern
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.layer_kinds import split_pattern
from lmtrain.models.llama.mtp import prediction, predictions
from lmtrain.models.moe.layer import Moe
from lmtrain.sharding.placement import constrain


class LlamaAttention(Attention):
    """Attention with rotary positions and grouped key heads."""

    config: LlamaConfig

    def setup(self) -> None:
        c = self.config
        init = normal(c.initializer_range)
        embed, head_dim = ("embed", c.hidden_dim), ("head_dim", c.head_width)
        heads, kv_heads = ("heads", c.num_heads), ("kv_heads", c.kv_heads)
        bias = c.use_bias or c.use_qkv_bias
        # with a gate, a head has its query and then its gate, in one product
        of_queries = ("head_dim", 2 * c.head_width) if c.attention_gate else head_dim
        self.q = Linear((embed,), (heads, of_queries), init, bias)
        self.k = Linear((embed,), (kv_heads, head_dim), init, bias)
        self.v = Linear((embed,), (kv_heads, head_dim), init, bias)
        self.out = Linear((heads, head_dim), (embed,), init, c.use_bias)
        self.drop_weights = nn.Dropout(0.0)
        if c.attention_sinks:
            self.sinks = self.param("sinks", declare(init, (heads,)), sizes((heads,)), jnp.float32)
        if c.qk_norm != "none":
            over_all, how = c.qk_norm == "all", (c.layer_norm_epsilon, c.norm_offset, c.qk_norm != "weightless")
            self.norm_q = RmsNorm((heads, head_dim) if over_all else (head_dim,), *how)
            self.norm_k = RmsNorm((kv_heads, head_dim) if over_all else (head_dim,), *how)
        (kind,) = c.pattern
        self.window = c.sliding_window if kind.attention == "sliding" else None
        self.has_rope = kind.rope
        self.rope = c.rope.local if kind.attention == "sliding" else c.rope
        self.frequency = frequencies(self.rope, c.head_width, c.seq_len)

    def project(self, x: jax.Array, positions_BS: jax.Array | None) -> Projected:
        positions = jnp.arange(x.shape[1])[None] if positions_BS is None else positions_BS
        # [B, S, H, C], [B, S, K, C] twice; without constraints, the compiler splits some of these products by position
        q = constrain(self.q(x), "act_batch", "act_seq", "act_heads", None)
        q, gate = jnp.split(q, 2, axis=-1) if self.config.attention_gate else (q, None)
        k, v = (constrain(part(x), "act_batch", "act_seq", "act_kv_heads", None) for part in (self.k, self.v))
        if self.config.qk_norm != "none":
            q, k = self.norm_q(q), self.norm_k(k)
        if self.has_rope:
            q, k = (rotate(part, positions, self.frequency, self.rope.magnitude) for part in (q, k))
        q, k, v = (part.transpose(0, 2, 1, 3) for part in (q, k, v))
        q = constrain(q, "act_batch", "act_heads", "act_seq", None)
        k, v = (constrain(part, "act_batch", "act_kv_heads", "act_seq", None) for part in (k, v))
        return Projected(q, k, v, gate)

    def scores(self, layer: jax.Array) -> dict[str, Any]:
        c = self.config
        sinks = self.sinks if c.attention_sinks else None
        return {"scale": c.score_scale, "window": self.window, "cap": c.attention_logit_cap, "sinks": sinks}


class LlamaBlock(Block):
    """Attention and an MLP, each with RMS norms before it, after it, or both, added to the residual stream.

    Between the two, the stream is float32: in bfloat16 its rounding makes the gradients of queries and keys less exact.
    """

    config: LlamaConfig

    def setup(self) -> None:
        c = self.config
        init, dims = normal(c.initializer_range), (("embed", c.hidden_dim),)
        self.norm_attn, self.norm_mlp = (RmsNorm(dims, c.layer_norm_epsilon, c.norm_offset) for _ in range(2))
        (kind,) = c.pattern
        self.position: str = kind.norm_position or c.norm_position
        if self.position == "both":
            self.norm_mixed, self.norm_added = (RmsNorm(dims, c.layer_norm_epsilon, c.norm_offset) for _ in range(2))
        self.is_linear = kind.attention == "linear"
        if self.is_linear:
            self.delta = GatedDelta(c)
        else:
            attention = LlamaAttention if c.latent_attention is None else LatentAttention
            self.attn = attention(c, self.backend)
        self.has_experts = kind.mlp == "moe"
        if c.moe is not None and self.has_experts:
            self.moe = Moe(c.moe, c.hidden_dim, c.expert_dim, c.activation_function, init)
        else:
            self.mlp = Mlp(c.hidden_dim, c.mlp_dim, c.activation_function, init, init, c.use_mlp_bias, c.gated_mlp)

    @property
    def mixer(self) -> TokenMixer:
        mixer: TokenMixer = self.delta if self.is_linear else self.attn
        return mixer

    def attention_input(self, x: jax.Array) -> jax.Array:
        return self._before(self.norm_attn, x)

    def add(
        self, x: jax.Array, mixed: jax.Array, deterministic: bool, documents: Documents = NO_DOCUMENTS
    ) -> jax.Array:
        both = self.position == "both"
        middle = x.astype(jnp.float32) + self._after(self.norm_mixed if both else self.norm_attn, mixed)
        read = self._before(self.norm_mlp, middle).astype(x.dtype)
        added = self.moe(read, documents.used, deterministic) if self.has_experts else self.mlp(read)
        return (middle + self._after(self.norm_added if both else self.norm_mlp, added)).astype(x.dtype)

    def _before(self, norm: RmsNorm, x: jax.Array) -> jax.Array:
        return x if self.position == "post" else norm(x)

    def _after(self, norm: RmsNorm, x: jax.Array) -> jax.Array:
        return x if self.position == "pre" else norm(x)


class LlamaLM(Decoder):
    """Llama and its relatives."""

    config: LlamaConfig

    block = LlamaBlock

    def setup(self) -> None:
        super().setup()
        if (mtp := self.config.mtp) is not None:
            self.mtp = predictions(self.config, self.attention, LlamaBlock, mtp.num_modules)

    def further_outputs(
        self, hidden_BSD: jax.Array, tokens_BS: jax.Array, deterministic: bool, documents: Documents
    ) -> Outputs:
        if self.config.mtp is None:
            return {}
        numbers = range(1, self.config.mtp.num_modules + 1)
        later = jnp.stack([self.embed(jnp.roll(tokens_BS, -k, axis=1)) for k in numbers])
        layers = self.config.num_layers + jnp.arange(len(numbers))
        _, hidden = self.mtp(hidden_BSD, later, layers, deterministic, documents)
        head = Head(hidden_BSD, self.head(), self.vocab_size, self.logit_cap, self.head_bias())
        return {f"mtp_{k}": head.replace(hidden=own) for k, own in zip(numbers, hidden, strict=True)}

    def look_ahead(
        self, hidden_BSD: jax.Array, tokens_BS: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        """The hidden states [B, S, D] of the first module of `mtp` from those of the model at new positions `start,
        start + 1, ...` and the tokens after these, and its cache with the first `count` of them."""
        module = prediction(self.config, self.attention, LlamaBlock)
        own = jax.tree.map(lambda leaf: leaf[0], self.mtp.variables["params"])
        inputs = (hidden_BSD, self.embed(tokens_BS), cache, start, count)
        found: Any = module.apply({"params": own}, *inputs, method="extend")
        return found

    def empty_look_ahead(self, batch: int, length: int) -> StackCache:
        """The cache of `look_ahead` before the first of `length` positions."""
        return StackCache.empty(self.config.mixers[-1:], batch, length, self.head().dtype)

    def build_norm(self) -> RmsNorm:
        c = self.config
        return RmsNorm((("embed", c.hidden_dim),), c.layer_norm_epsilon, c.norm_offset)

    @property
    def pattern(self) -> Pattern:
        return Pattern(*(tuple(map(self.config.of_kind, kinds)) for kinds in split_pattern(self.config.kinds)))

    @property
    def logit_cap(self) -> LogitCap | None:
        limit = self.config.final_logit_cap
        return None if limit is None else LogitCap(limit, self.config.final_logit_cap_type)

    @property
    def has_head_bias(self) -> bool:
        return self.config.use_head_bias

    @property
    def has_embedding_norm(self) -> bool:
        return self.config.embedding_norm

    @property
    def embedding_scale(self) -> float:
        return self.config.hidden_dim**0.5 if self.config.scale_embeddings else 1.0
