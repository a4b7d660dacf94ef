"""Settings that all model families share, and the checks between sizes."""

from pydantic import Field, model_validator

from lmtrain.config.base import Section
from lmtrain.config.errors import field_error
from lmtrain.config.suggest import nearest_divisors


class BaseModelConfig(Section):
    """Sizes of a stack of transformer blocks, and how it is computed."""

    seq_len: int = Field(1024, ge=2, description="Tokens per training sequence, and the longest context")
    hidden_dim: int = Field(768, ge=1, description="Width of the residual stream; a multiple of num_heads")
    num_layers: int = Field(12, ge=1, description="Number of blocks")
    num_heads: int = Field(12, ge=1, description="Attention heads per block")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the initial matrices")
    layer_norm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance in every norm")
    gradient_checkpointing: bool = Field(True, description="Recompute each block in the backward pass to save memory")
    scan_layers: bool = Field(True, description="Compile one block and loop over it; false unrolls the loop")

    @model_validator(mode="after")
    def _heads_divide(self) -> "BaseModelConfig":
        if self.hidden_dim % self.num_heads:
            near = " or ".join(map(str, nearest_divisors(self.hidden_dim, self.num_heads)))
            raise field_error(
                "num_heads",
                f"{self.num_heads} does not divide hidden_dim {self.hidden_dim}; num_heads could be {near}",
            )
        return self
