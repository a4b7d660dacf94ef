"""Settings that all model families share, and the checks between sizes."""

from typing import Any, Literal

from pydantic import Field, model_validator

from lmtrain.config.base import Section
from lmtrain.config.errors import field_error
from lmtrain.config.suggest import nearest_divisors

# Settings that do not change the meaning of the weights.
FREE = {
    "seq_len",
    "embed_pdrop",
    "resid_pdrop",
    "attn_pdrop",
    "initializer_range",
    "init_scheme",
    "gradient_checkpointing",
    "scan_layers",
    "attn_backend",
    "flash_attention_block_size",
    "pad_vocab_to_multiple_of",
}

RematPolicy = Literal["full", "dots", "dots_no_batch", "save_attention", "offload"]


class BaseModelConfig(Section):
    """Sizes of a stack of transformer blocks, and settings of its execution."""

    seq_len: int = Field(
        1024, ge=2, description="Sequence length: tokens per training sequence, and the maximum context"
    )
    hidden_dim: int = Field(
        768, ge=1, description="Hidden dimension: width of the residual stream; a multiple of num_heads"
    )
    num_layers: int = Field(12, ge=1, description="Number of layers (transformer blocks)")
    num_heads: int = Field(12, ge=1, description="Number of attention heads per layer")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the initial weight matrices")
    layer_norm_epsilon: float = Field(1e-5, gt=0, description="Epsilon of every norm, added to the variance")
    pad_vocab_to_multiple_of: int = Field(
        128, ge=1, description="Pad the rows of the embedding and the head to a multiple of this, to split over devices"
    )
    gradient_checkpointing: bool | RematPolicy = Field(
        True,
        description="Gradient checkpointing: recompute activations in the backward pass to save memory. true, full: "
        "all of a block; dots: all but matrix products; dots_no_batch: all but products with weights; "
        "save_attention: all but attention; offload: as full, with the inputs of blocks in host memory; false: nothing",
    )
    scan_layers: bool = Field(
        True, description="Scan over layers: compile one block and loop over it; false unrolls the loop"
    )
    attn_backend: Literal["auto", "xla", "blockwise", "cudnn", "triton", "splash"] = Field(
        "auto", description="Attention backend; auto takes the fastest that supports the model, and logs which"
    )
    flash_attention_block_size: int | None = Field(
        None, ge=16, description="Block size of attention in tokens, for attn_backend blockwise and splash; null: 512"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> "BaseModelConfig":
        if getattr(self, "head_dim", None) is None and self.hidden_dim % self.num_heads:
            near = " or ".join(map(str, nearest_divisors(self.hidden_dim, self.num_heads)))
            raise field_error(
                "num_heads",
                f"{self.num_heads} does not divide hidden_dim {self.hidden_dim}; num_heads could be {near}",
            )
        return self

    def padded(self, vocab_size: int) -> int:
        """Rows of the embedding for this vocabulary size, padded."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-vocab_size // multiple) * multiple

    def meaning(self) -> dict[str, Any]:
        """The settings that define the meaning of the weights, with defaults filled in: equal for equal models.

        Excluded are settings that may differ between training and use: length, dropout, initial values, execution.
        """
        return self.model_dump(exclude=FREE)

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.hidden_dim // self.num_heads

    @property
    def attention_needs(self) -> set[str]:
        """The features that attention needs, as keys of `attention_backends.FEATURES`."""
        needs = {"odd_length"} if self.seq_len % 128 else set[str]()
        needs |= {"wide_heads"} if self.head_width > 128 else set()
        needs |= {"very_wide_heads"} if self.head_width > 256 else set()
        return needs | ({"odd_heads"} if self.head_width % 8 else set())
