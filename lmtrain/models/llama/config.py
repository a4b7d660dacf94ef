"""Settings of the Llama family."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmtrain.config.base import Section
from lmtrain.config.errors import field_error
from lmtrain.config.suggest import nearest_divisors
from lmtrain.models.base_config import BaseModelConfig


class RopeConfig(Section):
    """Rotary positions, and how they are stretched beyond the length they were trained for."""

    type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = Field("default", description="Kind of stretching")
    theta: float = Field(10_000.0, gt=0, description="Base of the frequencies")
    factor: float = Field(1.0, ge=1, description="How many times longer the context gets")
    original_seq_len: int | None = Field(None, ge=1, description="Length trained for; needed by llama3 and yarn")
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: wavelengths above original_seq_len / this stretch")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: wavelengths below original_seq_len / this stay")
    beta_fast: float = Field(32.0, gt=0, description="yarn: frequencies with more turns than this stay")
    beta_slow: float = Field(1.0, gt=0, description="yarn: frequencies with fewer turns than this stretch whole")

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "RopeConfig":
        if self.type in ("llama3", "yarn") and self.original_seq_len is None:
            raise field_error("original_seq_len", f"rope type {self.type} needs it")
        if self.type == "default" and self.factor != 1:
            raise field_error("factor", "rope type default stretches nothing; set type to linear, llama3 or yarn")
        if self.high_freq_factor <= self.low_freq_factor:
            raise field_error("high_freq_factor", f"must be above low_freq_factor {self.low_freq_factor}")
        return self


class LlamaConfig(BaseModelConfig):
    """Llama; the defaults are the 7B model."""

    is_planned: ClassVar[bool] = True

    type: Literal["llama"] = Field("llama", description="The model family")
    seq_len: int = Field(2048, ge=2, description="Tokens per training sequence, and the longest context")
    hidden_dim: int = Field(4096, ge=1, description="Width of the residual stream")
    intermediate_dim: int = Field(11008, ge=1, description="Width of the gated MLP")
    num_layers: int = Field(32, ge=1, description="Number of blocks")
    num_heads: int = Field(32, ge=1, description="Query heads per block")
    num_kv_heads: int | None = Field(None, ge=1, description="Heads of keys and values; null: as many as num_heads")
    head_dim: int | None = Field(None, ge=1, description="Width of a head; null: hidden_dim / num_heads")
    activation_function: Literal["silu", "gelu", "gelu_new", "relu"] = Field("silu", description="Of the MLP's gate")
    use_bias: bool = Field(False, description="Biases in the attention's linear layers")
    tie_word_embeddings: bool = Field(False, description="Use the embedding table as the head")
    rope: RopeConfig = Field(default_factory=RopeConfig, description="Rotary positions")

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> "LlamaConfig":
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            near = " or ".join(map(str, nearest_divisors(self.num_heads, self.num_kv_heads)))
            raise field_error(
                "num_kv_heads",
                f"{self.num_kv_heads} does not divide num_heads {self.num_heads}; num_kv_heads could be {near}",
            )
        return self
