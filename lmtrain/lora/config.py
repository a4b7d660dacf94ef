"""Settings of LoRA, by the names of Levanter and PEFT."""

from typing import Annotated, Literal

from pydantic import Field

from lmtrain.config.section import RawText, Section, changeable, identity


class LoraConfig(Section):
    """Training of low-rank adapters (Hu et al. 2021) on the layers of a frozen base model."""

    r: int = identity(8, ge=1, le=2**16, description="Rank of the adapters; alias: rank")
    alpha: float = identity(
        8.0, gt=0, description="The adapters' outputs are multiplied by alpha / r; alias: lora_alpha"
    )
    dropout: float = identity(0.0, ge=0, lt=1, description="Dropout on the inputs of the adapters; alias: lora_dropout")
    target_modules: RawText | Annotated[list[RawText], Field(min_length=1)] | None = identity(
        None,
        description="Layers with adapters: a list of Hugging Face names such as q_proj, a regular expression for full "
        "names, or all-linear; null: all linear layers except the head",
    )
    use_rslora: bool = identity(False, description="Multiply by alpha / sqrt(r) instead of alpha / r")
    modules_to_save: list[str] = identity([], description="Tables that are trained in full: embed_tokens, lm_head")
    initialize_from: str | None = identity(
        None, min_length=1, description="PEFT adapter to start from: a folder, URL or hub id"
    )
    allow_other_base: bool = changeable(
        False, description="Accept an adapter of initialize_from that was trained on another base model"
    )
    base_dtype: Literal["float32", "bfloat16", "float16"] | None = identity(
        None, description="Dtype of the frozen parameters; null: that of the base model"
    )
    base_quantization: Literal["fp8", "int8", "nf4", "int4"] | None = changeable(
        None,
        description="Store the matrices of the frozen blocks in 8 bits (fp8, int8) or 4 bits (nf4 as in QLoRA, int4) "
        "during training; exports and other commands use the base as it is; null: off",
    )

    @property
    def scale(self) -> float:
        """The factor of the adapters' outputs."""
        return self.alpha / (self.r**0.5 if self.use_rslora else self.r)
