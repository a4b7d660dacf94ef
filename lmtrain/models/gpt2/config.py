"""Settings of the GPT-2 family."""

import math
from typing import Literal

from pydantic import Field, model_validator

from lmtrain.config.base import Section


class Gpt2Config(Section):
    """GPT-2; the defaults are the 124M model."""

    type: Literal["gpt2"] = Field("gpt2", description="The model family")
    seq_len: int = Field(1024, ge=2, description="Tokens per training sequence, and the longest context")
    hidden_dim: int = Field(768, ge=1, description="Width of the residual stream; a multiple of num_heads")
    num_layers: int = Field(12, ge=1, description="Number of blocks")
    num_heads: int = Field(12, ge=1, description="Attention heads per block")
    mlp_scale: int = Field(4, ge=1, description="Width of the MLP as a multiple of hidden_dim")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the initial matrices")
    layer_norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in every layer norm")
    embed_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout after the embeddings")
    resid_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on what attention and MLP add to the stream")
    attn_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on the attention weights")
    scale_attn_by_inverse_layer_idx: bool = Field(False, description="Divide attention scores by the layer's number")
    upcast_attn: bool = Field(False, description="Compute attention scores in float32 whatever the precision")
    gradient_checkpointing: bool = Field(True, description="Recompute each block in the backward pass to save memory")
    scan_layers: bool = Field(True, description="Compile one block and loop over it; false unrolls the loop")

    @model_validator(mode="after")
    def _heads_divide(self) -> "Gpt2Config":
        if self.hidden_dim % self.num_heads:
            small = [n for n in range(1, math.isqrt(self.hidden_dim) + 1) if self.hidden_dim % n == 0]
            fits = small + [self.hidden_dim // n for n in small]
            nearest = sorted(sorted(set(fits), key=lambda n: abs(n - self.num_heads))[:2])
            raise ValueError(
                f"hidden_dim {self.hidden_dim} is not a multiple of num_heads {self.num_heads}; "
                f"num_heads could be {' or '.join(map(str, nearest))}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return self.hidden_dim * self.mlp_scale

    @property
    def has_dropout(self) -> bool:
        return max(self.embed_pdrop, self.resid_pdrop, self.attn_pdrop) > 0
