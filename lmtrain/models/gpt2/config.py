"""Settings of the GPT-2 family."""

from typing import Literal

from pydantic import Field

from lmtrain.models.base_config import BaseModelConfig


class Gpt2Config(BaseModelConfig):
    """GPT-2; the defaults are the 124M model."""

    type: Literal["gpt2"] = Field("gpt2", description="The model family")
    mlp_scale: int = Field(4, ge=1, description="Width of the MLP as a multiple of hidden_dim")
    embed_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout after the embeddings")
    resid_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on what attention and MLP add to the stream")
    attn_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on the attention weights")
    scale_attn_by_inverse_layer_idx: bool = Field(False, description="Divide attention scores by the layer's number")
    upcast_attn: bool = Field(False, description="Compute attention scores in float32 whatever the precision")

    @property
    def head_dim(self) -> int:
        return self.hidden_dim // self.num_heads

    @property
    def mlp_dim(self) -> int:
        return self.hidden_dim * self.mlp_scale
