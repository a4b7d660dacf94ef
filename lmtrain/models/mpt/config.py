"""Settings of the MPT family."""

from typing import ClassVar, Literal

from pydantic import Field

from lmtrain.models.base_config import BaseModelConfig


class MptConfig(BaseModelConfig):
    """MPT with ALiBi; the defaults are the 125M model."""

    is_planned: ClassVar[bool] = True

    type: Literal["mpt"] = Field("mpt", description="The model family")
    seq_len: int = Field(2048, ge=2, description="Tokens per training sequence, and the longest context")
    mlp_scale: int = Field(4, ge=1, description="Width of the MLP as a multiple of hidden_dim")
    use_bias: bool = Field(False, description="Biases in linear layers and norms")
    alibi_bias_max: float = Field(8.0, gt=0, description="Largest exponent of ALiBi's slopes")
    clip_qkv: float | None = Field(None, gt=0, description="Clip queries, keys and values to plus or minus this")
    softmax_scale: float | None = Field(None, gt=0, description="Factor of attention scores; null: 1/sqrt(head size)")
    attn_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on the attention weights")
    resid_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on what attention and MLP add to the stream")
    embed_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout after the embeddings")
