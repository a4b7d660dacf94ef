"""Settings of the GPT-2 family."""

from typing import Any, Literal

from lmtrain.config.section import architecture, identity
from lmtrain.models.base_config import BaseModelConfig


class Gpt2Settings(BaseModelConfig):
    """Settings of a stack of GPT-2 blocks."""

    mlp_scale: int = architecture(4, ge=1, description="Hidden dimension of the MLP as a multiple of hidden_dim")
    intermediate_dim: int | None = architecture(
        None, ge=1, description="Hidden dimension of the MLP; null: mlp_scale * hidden_dim"
    )
    activation_function: Literal["gelu_new", "gelu", "relu", "silu"] = architecture(
        "gelu_new", description="Activation function of the MLP; gelu_new is the tanh approximation of GELU"
    )
    use_bias: bool = architecture(True, description="Add biases to linear layers and norms")
    embed_pdrop: float = identity(0.0, ge=0, lt=1, description="Dropout rate after the embeddings")
    resid_pdrop: float = identity(0.0, ge=0, lt=1, description="Dropout rate on the outputs of attention and MLP")
    attn_pdrop: float = identity(0.0, ge=0, lt=1, description="Dropout rate on the attention weights")
    scale_attn_by_inverse_layer_idx: bool = architecture(
        False, description="Scale of attention scores: divide by the layer's number, from 1 on"
    )
    upcast_attn: bool = architecture(False, description="Compute attention scores in float32 for any trainer.mp")

    def meaning(self) -> dict[str, Any]:
        values = super().meaning()
        del values["mlp_scale"]
        return values | {"intermediate_dim": self.mlp_dim}

    @property
    def mlp_dim(self) -> int:
        return self.intermediate_dim or self.hidden_dim * self.mlp_scale

    def initial_range(self, inputs: int, adds: bool = False) -> float:
        return self.initializer_range / (2 * self.num_layers) ** 0.5 if adds else self.initializer_range

    @property
    def has_dropout(self) -> bool:
        return max(self.embed_pdrop, self.resid_pdrop, self.attn_pdrop) > 0

    @property
    def attention_needs(self) -> set[str]:
        needs = super().attention_needs | ({"dropout"} if self.attn_pdrop else set())
        return needs | ({"upcast"} if self.upcast_attn else set())


class Gpt2Config(Gpt2Settings):
    """GPT-2; the defaults are the 124M model."""

    type: Literal["gpt2"] = architecture("gpt2", description="Model family: GPT-2")
    tie_word_embeddings: bool = architecture(True, description="Tie the output head to the embedding table")
