"""Settings of the MPT family."""

from typing import Literal

from pydantic import Field, model_validator

from lmtrain.config.errors import field_error
from lmtrain.models import flops
from lmtrain.models.base_config import BaseModelConfig


class MptConfig(BaseModelConfig):
    """MPT with ALiBi; the defaults are the 125M model."""

    type: Literal["mpt"] = Field("mpt", description="Model family: MPT")
    seq_len: int = Field(
        2048, ge=2, description="Sequence length: tokens per training sequence, and the maximum context"
    )
    mlp_scale: int = Field(4, ge=1, description="Hidden dimension of the MLP as a multiple of hidden_dim")
    use_bias: bool = Field(False, description="Add biases to linear layers and norms")
    tie_word_embeddings: bool = Field(True, description="Tie the output head to the embedding table")
    alibi_bias_max: float = Field(8.0, gt=0, description="Largest exponent of ALiBi's slopes")
    clip_qkv: float | None = Field(
        None, gt=0, description="Clipping of queries, keys and values to plus or minus this; null: none"
    )
    softmax_scale: float | None = Field(
        None, gt=0, description="Scale of attention scores; null: 1 / sqrt(head dimension)"
    )
    attn_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout rate on the attention weights")
    resid_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout rate on the outputs of attention and MLP")
    embed_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout rate after the embeddings")
    init_scheme: Literal["kaiming", "normal"] = Field(
        "kaiming",
        description="Initial weight matrices: kaiming: by number of inputs (MPT's recipe); normal: initializer_range",
    )

    @model_validator(mode="after")
    def _range_is_used(self) -> "MptConfig":
        if (
            self.init_scheme == "kaiming"
            and self.initializer_range != type(self).model_fields["initializer_range"].default
        ):
            raise field_error("initializer_range", "is used only with init_scheme: normal; kaiming ignores it")
        return self

    @property
    def has_dropout(self) -> bool:
        return max(self.embed_pdrop, self.resid_pdrop, self.attn_pdrop) > 0

    @property
    def attention_needs(self) -> set[str]:
        return super().attention_needs | {"alibi"} | ({"dropout"} if self.attn_pdrop else set())

    def num_flops_per_token(self, vocab_size: int, causal: bool = False) -> float:
        """FLOPs of a forward pass per token; see `lmtrain/models/flops.py`."""
        keys = flops.mean_keys(self.seq_len, causal)
        heads = self.num_heads
        block = flops.attention(self.hidden_dim, heads, heads, self.head_width, keys)
        block += flops.mlp(self.hidden_dim, self.hidden_dim * self.mlp_scale)
        return self.num_layers * block + flops.linear(self.hidden_dim, vocab_size)  # and the head
