"""Settings of starting from a Hugging Face model and of exporting to one."""

from typing import Literal

from pydantic import Field

from lmtrain.config.base import Section


class HuggingFaceConfig(Section):
    """Starting from Hugging Face weights, and exporting during training. These stand at the top level of a config."""

    initialize_from_hf: bool | str = Field(
        False, description="Begin from these weights: a hub id, id@revision or folder; true: the family's own default"
    )
    use_hf_model_config: bool = Field(
        False, description="Take the model's sizes from initialize_from_hf instead of the model section"
    )
    allow_other_tokenizer: bool = Field(
        False, description="Begin from initialize_from_hf though data.tokenizer gives its ids to other tokens"
    )
    hf_save_path: str | None = Field(
        None, min_length=1, description="Folder of exports during training; the run id is appended; null: none"
    )
    hf_save_steps: int = Field(
        10_000, ge=1, description="Export every so many steps and after the last, if hf_save_path or hf_upload is set"
    )
    hf_upload: str | None = Field(None, description="Hub repository to upload exports to: owner/name[@revision]")
    hf_save_dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Type of exported weights, here and by `lmtrain export-hf`; null: that of the parameters"
    )
