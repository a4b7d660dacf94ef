"""Settings of Gated DeltaNet layers."""

from pydantic import model_validator

from lmtrain.config.section import architecture
from lmtrain.models.base_config import Sizes
from lmtrain.runtime.errors import field_error


class GatedDeltaConfig(Sizes):
    """Gated DeltaNet (Qwen3-Next): a state of constant size instead of keys and values of all positions."""

    num_key_heads: int = architecture(16, ge=1, description="Number of heads of queries and keys")
    num_value_heads: int = architecture(32, ge=1, description="Number of heads of values; a multiple of num_key_heads")
    key_head_dim: int = architecture(128, ge=1, description="Head dimension of queries and keys")
    value_head_dim: int = architecture(128, ge=1, description="Head dimension of values")
    conv_kernel_dim: int = architecture(4, ge=2, description="Positions that the convolution before the rule sees")

    @model_validator(mode="after")
    def _heads_divide(self) -> "GatedDeltaConfig":
        if self.num_value_heads % self.num_key_heads:
            raise field_error("num_value_heads", f"must be a multiple of num_key_heads {self.num_key_heads}")
        return self
