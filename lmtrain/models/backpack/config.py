"""Settings of the Backpack family."""

from collections.abc import Set
from typing import Literal

from pydantic import model_validator

from lmtrain.config.section import architecture
from lmtrain.models.gpt2.config import Gpt2Settings
from lmtrain.models.mixer import AttentionMixer, Mixer, linear_flops, mean_keys, mlp_flops
from lmtrain.runtime.errors import field_error, nearest_divisors


class SenseMixer(AttentionMixer):
    """Attention to sense vectors, whose width is that of the stream; a sense is a head."""

    @property
    def features(self) -> Set[str]:
        is_odd = self.hidden_dim > 256 and self.hidden_dim % 128 != 0
        return {"wide_values", "odd_values"} if is_odd else {"wide_values"}

    def flops(self, seq_len: int, causal: bool) -> tuple[float, float]:
        dim, keys = self.hidden_dim, mean_keys(seq_len, causal)
        # queries and keys; their scores; the weighted sum of sense vectors, each of width hidden_dim
        return linear_flops(dim, 2 * dim), linear_flops(dim, 1) * keys + linear_flops(self.heads * dim, 1) * keys

    def heads_on(self, parts: int) -> int:
        return self.heads if self.heads % parts else self.heads // parts


class BackpackConfig(Gpt2Settings):
    """Backpack on a GPT-2 trunk; the defaults are the 170M model."""

    type: Literal["backpack"] = architecture("backpack", description="Model family: Backpack")
    num_senses: int = architecture(16, ge=1, description="Sense vectors per token; must divide hidden_dim")
    sense_intermediate_scale: int = architecture(
        4, ge=1, description="Hidden dimension of the sense MLP as a multiple of hidden_dim"
    )
    divide_by_num_senses: bool = architecture(False, description="Average the sense vectors instead of summing them")
    scale_attn_by_inverse_layer_idx: bool = architecture(
        True, description="Scale of attention scores: divide by the layer's number, from 1 on"
    )

    @model_validator(mode="after")
    def _senses_divide(self) -> "BackpackConfig":
        if self.hidden_dim % self.num_senses:
            near = " or ".join(map(str, nearest_divisors(self.hidden_dim, self.num_senses)))
            raise field_error(
                "num_senses",
                f"{self.num_senses} does not divide hidden_dim {self.hidden_dim}; num_senses could be {near}",
            )
        return self

    @property
    def sense_width(self) -> int:
        """Width of the queries and keys of one sense."""
        return self.hidden_dim // self.num_senses

    @property
    def all_mixers(self) -> tuple[Mixer, ...]:
        senses = SenseMixer(
            hidden_dim=self.hidden_dim, heads=self.num_senses, kv_heads=self.num_senses, head_width=self.sense_width
        )
        return *self.mixers, senses

    def num_flops_per_token(self, vocab_size: int, causal: bool = False) -> float:
        """FLOPs of a forward pass per token; see `lmtrain/models/mixer.py`."""
        dim, inner = self.hidden_dim, self.hidden_dim * self.sense_intermediate_scale
        vectors = mlp_flops(dim, self.mlp_dim) + linear_flops(dim, inner) + linear_flops(inner, self.num_senses * dim)
        return super().num_flops_per_token(vocab_size, causal) + vectors
