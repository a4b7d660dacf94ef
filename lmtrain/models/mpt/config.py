"""Settings of the MPT family."""

from typing import ClassVar, Literal

from pydantic import model_validator

from lmtrain.config.section import architecture, identity
from lmtrain.models.base_config import POSITIONS, BaseModelConfig
from lmtrain.runtime.errors import field_error


class MptConfig(BaseModelConfig):
    """MPT with ALiBi; the defaults are the 125M model."""

    activation_function: ClassVar[str] = "gelu"

    type: Literal["mpt"] = architecture("mpt", description="Model family: MPT")
    seq_len: int = identity(
        2048, ge=2, lt=POSITIONS, description="Sequence length: tokens per training sequence, and the maximum context"
    )
    mlp_scale: int = architecture(4, ge=1, description="Hidden dimension of the MLP as a multiple of hidden_dim")
    use_bias: bool = architecture(False, description="Add biases to linear layers and norms")
    tie_word_embeddings: bool = architecture(True, description="Tie the output head to the embedding table")
    alibi_bias_max: float = architecture(8.0, gt=0, description="Largest exponent of ALiBi's slopes")
    clip_qkv: float | None = architecture(
        None, gt=0, description="Clipping of queries, keys and values to plus or minus this; null: none"
    )
    softmax_scale: float | None = architecture(
        None, gt=0, description="Scale of attention scores; null: 1 / sqrt(head dimension)"
    )
    attn_pdrop: float = identity(0.0, ge=0, lt=1, description="Dropout rate on the attention weights")
    resid_pdrop: float = identity(0.0, ge=0, lt=1, description="Dropout rate on the outputs of attention and MLP")
    embed_pdrop: float = identity(0.0, ge=0, lt=1, description="Dropout rate after the embeddings")
    init_scheme: Literal["kaiming", "normal"] = identity(
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
    def score_scale(self) -> float:
        return self.softmax_scale or super().score_scale

    def initial_range(self, inputs: int, adds: bool = False) -> float:
        spread: float = self.initializer_range if self.init_scheme == "normal" else (2 / inputs) ** 0.5
        return spread / (2 * self.num_layers) ** 0.5 if adds else spread

    @property
    def has_dropout(self) -> bool:
        return max(self.embed_pdrop, self.resid_pdrop, self.attn_pdrop) > 0

    @property
    def attention_needs(self) -> set[str]:
        return super().attention_needs | {"alibi"} | ({"dropout"} if self.attn_pdrop else set())

    @property
    def mlp_dim(self) -> int:
        return self.hidden_dim * self.mlp_scale
