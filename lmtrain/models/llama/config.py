"""Settings of the Llama family."""

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from lmtrain.config.errors import field_error
from lmtrain.config.setting import architecture, identity
from lmtrain.config.suggest import nearest_divisors
from lmtrain.models.base_config import POSITIONS, BaseModelConfig
from lmtrain.models.rope_config import RopeConfig


class LlamaConfig(BaseModelConfig):
    """Llama; the defaults are the 7B model."""

    mlp_matrices: ClassVar[int] = 3

    type: Literal["llama"] = architecture("llama", description="Model family: Llama")
    seq_len: int = identity(
        2048, ge=2, lt=POSITIONS, description="Sequence length: tokens per training sequence, and the maximum context"
    )
    hidden_dim: int = architecture(4096, ge=1, description="Hidden dimension: width of the residual stream")
    intermediate_dim: int = architecture(11008, ge=1, description="Hidden dimension of the gated MLP")
    num_layers: int = architecture(32, ge=1, description="Number of layers (transformer blocks)")
    num_heads: int = architecture(32, ge=1, description="Number of query heads per layer")
    num_kv_heads: int | None = architecture(None, ge=1, description="Number of key and value heads; null: num_heads")
    head_dim: int | None = architecture(None, ge=1, description="Head dimension; null: hidden_dim / num_heads")
    activation_function: Literal["silu", "gelu", "gelu_new", "relu"] = architecture(
        "silu", description="Activation function of the MLP's gate"
    )
    use_bias: bool = architecture(False, description="Add biases to the linear layers of attention")
    use_qkv_bias: bool = architecture(False, description="Add biases to queries, keys and values only (Qwen2)")
    use_mlp_bias: bool = architecture(False, description="Add biases to the linear layers of the MLP")
    sliding_window: int | None = architecture(
        None,
        ge=1,
        description="Sliding window: maximum number of tokens that a query sees (Mistral); null: all before it",
    )
    qk_norm: Literal["none", "head", "all"] = architecture(
        "none",
        description="Normalization of queries and keys: head: within each head (Qwen3); all: over all heads (OLMo2)",
    )
    norm_position: Literal["pre", "post"] = architecture(
        "pre", description="Position of norms: pre: before attention and MLP; post: on their outputs (OLMo2)"
    )
    norm_offset: bool = architecture(False, description="Scale norms by 1 + weight (Gemma)")
    scale_embeddings: bool = architecture(False, description="Multiply the embeddings by sqrt(hidden_dim) (Gemma)")
    tie_word_embeddings: bool = architecture(False, description="Tie the output head to the embedding table")
    rope: RopeConfig = architecture(default_factory=RopeConfig, description="Rotary positions")

    @model_validator(mode="after")
    def _kv_heads_divide(self) -> "LlamaConfig":
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            near = " or ".join(map(str, nearest_divisors(self.num_heads, self.num_kv_heads)))
            raise field_error(
                "num_kv_heads",
                f"{self.num_kv_heads} does not divide num_heads {self.num_heads}; num_kv_heads could be {near}",
            )
        return self

    @model_validator(mode="after")
    def _head_size_is_even(self) -> "LlamaConfig":
        if self.head_width % 2:
            raise field_error("head_dim", f"rotary embeddings require an even head dimension; {self.head_width} is odd")
        return self

    def meaning(self) -> dict[str, Any]:
        values = super().meaning()
        return values | {"num_kv_heads": self.kv_heads, "head_dim": self.head_width, "rope": self.rope.meaning()}

    @property
    def head_width(self) -> int:
        """Head dimension."""
        return self.head_dim or self.hidden_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def has_dropout(self) -> bool:
        return False

    @property
    def mlp_dim(self) -> int:
        return self.intermediate_dim

    @property
    def window(self) -> int | None:
        return self.sliding_window
