"""Latent attention as a layer (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1).

    c = norm(x Wc);   k, v = c Wkv;   r = rope(x Wr);   q, q' = x Wq, or norm(x Wa) Wb;   scores: q k^T + rope(q') r^T

All heads share the rotated keys r. Keys and values of all heads are linear in c, so that generation keeps only c and r:
with W the part of Wkv that makes the keys of a head, q k^T is (q W^T) c^T.

    B batch  S query position  T key position  D embed  H heads  L width of the latent  N, R dimensions without and with
    rotary positions  C = N + R  V width of values
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import normal

from lmtrain.models.attention.attend import attend
from lmtrain.models.attention.kernel import join_keys, self_attend_latent
from lmtrain.models.cache import KvCache, StackCache
from lmtrain.models.interface import Documents
from lmtrain.models.latent.config import NORM_EPSILON, LatentMixer
from lmtrain.models.layers.linear import Linear
from lmtrain.models.layers.mlp import RmsNorm
from lmtrain.models.layers.remat import unfused
from lmtrain.models.layers.rope import frequencies, rotate
from lmtrain.sharding.placement import constrain


class LatentAttention(nn.Module):
    """The module of `LatentMixer`, the only mixer of `config.mixers`: [B, S, D] -> [B, S, D]."""

    config: Any
    backend: str

    def setup(self) -> None:
        c, own = self.config, self.mixer.latent
        init, embed, heads = normal(c.initializer_range), ("embed", c.hidden_dim), ("heads", c.num_heads)
        queries, latent = ("head_dim", own.head_width), (("latent", own.kv_lora_rank),)
        if own.q_lora_rank is None:
            self.q = Linear((embed,), (heads, queries), init, False)
        else:
            of_queries = (("latent", own.q_lora_rank),)
            self.q_a = Linear((embed,), (("to_latent", own.q_lora_rank),), init, c.use_bias)
            self.norm_q = RmsNorm(of_queries, NORM_EPSILON)
            self.q_b = Linear(of_queries, (heads, queries), init, False)
        self.kv_a = Linear((embed,), (("to_latent", own.kv_lora_rank + own.qk_rope_head_dim),), init, c.use_bias)
        self.norm_kv = RmsNorm(latent, NORM_EPSILON)
        self.kv_b = Linear(latent, (heads, ("head_dim", own.qk_nope_head_dim + own.v_head_dim)), init, False)
        self.out = Linear((heads, ("head_dim", own.v_head_dim)), (embed,), init, c.use_bias)
        self.frequency = frequencies(c.rope, own.qk_rope_head_dim, c.seq_len)

    @property
    def mixer(self) -> LatentMixer:
        mixer: LatentMixer = self.config.mixers[0]
        return mixer

    def __call__(self, x: jax.Array, layer: jax.Array, deterministic: bool, documents: Documents) -> jax.Array:
        x = unfused(x)
        positions = jnp.arange(x.shape[1])[None] if documents.positions is None else documents.positions
        latent, shared = self._latent(x, positions)
        kv = constrain(self.kv_b(latent), "act_batch", "act_seq", "act_heads", None)
        mixed_BHSV = self_attend_latent(
            self.backend,
            _heads_first(self._queries(x, positions)),
            _heads_first(kv),
            shared[:, None],
            self.config.score_scale,
            window=self.mixer.window,
            segments=documents.segments,
            block_size=self.config.flash_attention_block_size,
        )
        mixed = constrain(mixed_BHSV.transpose(0, 2, 1, 3), "act_batch", "act_seq", "act_heads", None)
        return unfused(self.out(mixed))

    def extend(
        self, x: jax.Array, layer: jax.Array, cache: StackCache, start: jax.Array, count: Any
    ) -> tuple[jax.Array, StackCache]:
        """Attention of new positions `start, start + 1, ...` to all earlier ones and themselves.

        A few new queries attend to latents; for many it takes fewer FLOPs to compute keys and values first.
        """
        own, (kind, number) = self.mixer.latent, cache.find(self.mixer, layer)
        nope, width = own.qk_nope_head_dim, own.kv_lora_rank
        positions = jnp.reshape(start, (-1, 1)) + jnp.arange(x.shape[1])
        q, new = self._queries(x, positions), jnp.concatenate(self._latent(x, positions), axis=-1)[:, None]
        stored = cache.states[kind]["latent"]
        state, keys = KvCache(stored, stored[..., :0]).extend(
            new, new[..., :0], number, self.mixer.window, start, count
        )
        latents_B1TL = keys.k[..., :width]

        def mix(q_BHSC: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend(q_BHSC, k, v, self.config.score_scale, start, key_at=keys.at, window=self.mixer.window)

        if x.shape[1] * (2 * width - nope - own.v_head_dim) > width * (nope + own.v_head_dim):
            kv = _heads_first(self.kv_b(latents_B1TL[:, 0]))
            k, v = join_keys(own.head_width, kv, keys.k[..., width:])
            mixed = _heads_first(mix(_heads_first(q), k, v))
        else:
            to_kv = self.kv_b.matrix().astype(x.dtype)
            of_latents = jnp.einsum("BSHN,LHN->BSHL", q[..., :nope], to_kv[..., :nope])
            q_BHSC = _heads_first(jnp.concatenate([of_latents, q[..., nope:]], axis=-1))
            mixed = jnp.einsum("BHSL,LHV->BSHV", mix(q_BHSC, keys.k, latents_B1TL), to_kv[..., nope:])
        return self.out(mixed), cache.with_state(kind, {"latent": state.k})

    def _queries(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """[B, S, H, C], with the last R dimensions rotated."""
        own = self.mixer.latent
        q = self.q(x) if own.q_lora_rank is None else self.q_b(self.norm_q(self.q_a(x)))
        q = constrain(q, "act_batch", "act_seq", "act_heads", None)
        return jnp.concatenate([q[..., : own.qk_nope_head_dim], self._rotated(q, positions)], axis=-1)

    def _latent(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The latent of keys and values [B, S, L], and the rotated keys [B, S, R]."""
        both = constrain(self.kv_a(x), "act_batch", "act_seq", None)
        latent = self.norm_kv(both[..., : self.mixer.latent.kv_lora_rank])
        return latent, self._rotated(both[:, :, None], positions)[:, :, 0]

    def _rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """The last R dimensions, rotated."""
        last = x[..., -self.mixer.latent.qk_rope_head_dim :]
        return rotate(last, positions, self.frequency, self.config.rope.magnitude)


def _heads_first(x: jax.Array) -> jax.Array:
    """[B, S, H, C] -> [B, H, S, C], or back."""
    return x.transpose(0, 2, 1, 3)
