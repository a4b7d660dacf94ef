"""Settings of Hugging Face import and export."""

from typing import Literal

from pydantic import Field

from lmtrain.config.base import Section


class HuggingFaceConfig(Section):
    """Import of Hugging Face weights and exports during training. Set at the top level of a config."""

    initialize_from_hf: bool | str = Field(
        False, description="Initial weights: a hub id, id@revision or folder; true: the default model of the family"
    )
    use_hf_model_config: bool = Field(
        False, description="Model sizes are read from initialize_from_hf instead of the model section"
    )
    allow_other_tokenizer: bool = Field(
        False, description="Accept initialize_from_hf although data.tokenizer assigns its ids to other tokens"
    )
    hf_save_path: str | None = Field(
        None, min_length=1, description="Folder of exports during training; the run id is appended; null: no exports"
    )
    hf_save_steps: int = Field(
        10_000,
        ge=1,
        description="Export interval in steps; the last step is also exported. Requires hf_save_path or hf_upload",
    )
    hf_upload: str | None = Field(None, description="Hub repository to upload exports to: owner/name[@revision]")
    hf_save_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Dtype of exported weights, also in `lmtrain export-hf`; null: dtype of the parameters"
    )
