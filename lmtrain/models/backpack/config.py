"""Settings of the Backpack family."""

from typing import Literal

from pydantic import model_validator

from lmtrain.config.section import architecture
from lmtrain.models import flops
from lmtrain.models.gpt2.config import Gpt2Settings
from lmtrain.runtime.errors import field_error, nearest_divisors


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

    def heads_on(self, parts: int) -> list[int]:
        senses = self.num_senses if self.num_senses % parts else self.num_senses // parts
        return [*super().heads_on(parts), senses]

    @property
    def attention_needs(self) -> set[str]:
        odd = {"odd_values"} if self.hidden_dim > 256 and self.hidden_dim % 128 else set[str]()
        return super().attention_needs | {"wide_values"} | odd

    def num_flops_per_token(self, vocab_size: int, causal: bool = False) -> float:
        """FLOPs of a forward pass per token; see `lmtrain/models/flops.py`."""
        dim, senses = self.hidden_dim, self.num_senses
        keys = flops.mean_keys(self.seq_len, causal)
        trunk = super().num_flops_per_token(vocab_size, causal)
        inner = dim * self.sense_intermediate_scale
        vectors = flops.mlp(dim, self.mlp_dim) + flops.linear(dim, inner) + flops.linear(inner, senses * dim)
        # queries and keys; their scores; the weighted sum of sense vectors, each of width hidden_dim
        weights = flops.linear(dim, 2 * dim) + flops.linear(dim, 1) * keys + flops.linear(senses * dim, 1) * keys
        return trunk + vectors + weights
