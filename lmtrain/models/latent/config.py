"""Settings of latent attention, and the token mixer that they describe, for FLOPs, plans and caches. Imports no JAX."""

from collections.abc import Mapping, Set
from dataclasses import dataclass

from lmtrain.config.section import architecture
from lmtrain.models.base_config import Sizes
from lmtrain.models.mixer import (
    AttentionMixer,
    SequenceSplit,
    StateArray,
    describe_split,
    exchange_size,
    linear_flops,
    mean_keys,
)

# Epsilon of the norms of latents, whatever that of other norms.
NORM_EPSILON = 1e-6


class LatentAttentionConfig(Sizes):
    """Latent attention (DeepSeek-V2 and V3): keys and values of all heads are computed from a small latent."""

    q_lora_rank: int | None = architecture(
        None, ge=1, description="Width of the latent of queries; null: none (DeepSeek-V2-Lite)"
    )
    kv_lora_rank: int = architecture(512, ge=1, description="Width of the latent of keys and values")
    qk_nope_head_dim: int = architecture(
        128, ge=1, description="Head dimension of queries and keys without rotary positions"
    )
    qk_rope_head_dim: int = architecture(
        64, ge=2, multiple_of=2, description="Further dimensions with rotary positions; keys of all heads share them"
    )
    v_head_dim: int = architecture(128, ge=1, description="Head dimension of values")
    rope_interleave: bool = architecture(
        True, description="Order of the dimensions with rotary positions in exports: in pairs, as DeepSeek's"
    )

    @property
    def head_width(self) -> int:
        """Width of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class LatentMixer(AttentionMixer):
    """Latent attention; `head_width` is that of queries and keys."""

    latent: LatentAttentionConfig

    @property
    def features(self) -> Set[str]:
        values, keys = self.latent.v_head_dim, self.head_width
        needs = {"narrow_values": values < keys, "wide_values": values > keys, "odd_values": values > max(keys, 256)}
        return {*super().features, *(name for name, is_needed in needs.items() if is_needed)}

    @property
    def score_share(self) -> float:
        return self.head_width / (self.head_width + self.latent.v_head_dim)

    def flops(self, seq_len: int, causal: bool) -> tuple[float, float]:
        c, values = self.latent, self.heads * self.latent.v_head_dim
        queries, expanded = self.heads * self.head_width, self.heads * (c.qk_nope_head_dim + c.v_head_dim)
        of_queries = linear_flops(self.hidden_dim, queries)
        if c.q_lora_rank is not None:
            of_queries = linear_flops(self.hidden_dim + queries, c.q_lora_rank)
        of_latent = linear_flops(self.hidden_dim, c.kv_lora_rank + c.qk_rope_head_dim)
        projections = of_queries + of_latent + linear_flops(c.kv_lora_rank, expanded)
        each_key = linear_flops(queries, 1) + linear_flops(values, 1)
        keys = mean_keys(seq_len, causal, self.window)
        return projections + linear_flops(values, self.hidden_dim), each_key * keys

    def split(self, parts: int, head_parts: int) -> SequenceSplit:
        """As attention; each group of devices has one copy of the keys that all heads share."""
        c, heads = self.latent, self.heads_on(head_parts)
        size = exchange_size(parts, heads)
        keys = heads * (c.qk_nope_head_dim + c.v_head_dim) + size * c.qk_rope_head_dim
        queries = heads * (self.head_width + c.v_head_dim)
        gathered = keys * (parts // size - 1) + queries / 2 if size < parts else 0.0
        return SequenceSplit(
            describe_split(parts, heads),
            (queries + keys) * (size - 1) / size + gathered,
            has_parts=size < parts,
            needs_even=size < parts and size % 2 == 1,
        )

    def state(self, length: int) -> Mapping[str, StateArray]:
        """The latent of a position and its rotated key, which all heads share."""
        size = length if self.window is None else min(self.window, length)
        return {"latent": StateArray((1, size, self.latent.kv_lora_rank + self.latent.qk_rope_head_dim))}
