"""Settings of the Backpack family."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtrain.config.errors import field_error
from lmtrain.config.suggest import nearest_divisors
from lmtrain.models.base_config import BaseModelConfig


class BackpackConfig(BaseModelConfig):
    """Backpack on a GPT-2 trunk; the defaults are the 170M model."""

    is_planned: ClassVar[bool] = True

    type: Literal["backpack"] = Field("backpack", description="The model family")
    mlp_scale: int = Field(4, ge=1, description="Width of the MLPs as a multiple of hidden_dim")
    num_senses: int = Field(16, ge=1, description="Sense vectors per token; divides hidden_dim")
    sense_intermediate_scale: int = Field(4, ge=1, description="Width of the senses' MLP as a multiple of hidden_dim")
    divide_by_num_senses: bool = Field(False, description="Average the senses instead of adding them up")
    embed_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout after the embeddings")
    resid_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on what attention and MLP add to the stream")
    attn_pdrop: float = Field(0.0, ge=0, lt=1, description="Dropout on the attention weights")
    scale_attn_by_inverse_layer_idx: bool = Field(True, description="Divide attention scores by the layer's number")
    upcast_attn: bool = Field(False, description="Compute attention scores in float32 whatever the precision")

    @model_validator(mode="after")
    def _senses_divide(self) -> "BackpackConfig":
        if self.hidden_dim % self.num_senses:
            near = " or ".join(map(str, nearest_divisors(self.hidden_dim, self.num_senses)))
            raise field_error(
                "num_senses",
                f"{self.num_senses} does not divide hidden_dim {self.hidden_dim}; num_senses could be {near}",
            )
        return self
