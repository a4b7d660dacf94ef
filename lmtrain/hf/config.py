"""Settings of Hugging Face import and export."""

from typing import Literal

from lmtrain.config.section import RunPath, Section, changeable, tunable

# Names of variables that transformers' renderer of chat templates sets itself.
RENDERER_NAMES = {
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "conversations",
    "chat_template",
    "return_assistant_tokens_mask",
    "self",
}


class HuggingFaceConfig(Section):
    """Import of Hugging Face weights and exports during training. Set at the top level of a config."""

    initialize_from_hf: bool | str = tunable(
        False, description="Initial weights: a hub id, id@revision or folder; true: the default model of the family"
    )
    use_hf_model_config: bool = changeable(
        False, description="Model sizes are read from initialize_from_hf instead of the model section"
    )
    allow_other_tokenizer: bool = changeable(
        False, description="Accept initialize_from_hf although data.tokenizer assigns its ids to other tokens"
    )
    hf_save_path: RunPath | None = changeable(
        None, min_length=1, description="Folder of exports during training; the run id is appended; null: no exports"
    )
    hf_save_steps: int = changeable(
        10_000,
        ge=1,
        description="Export interval in steps; the last step is also exported. Requires hf_save_path or hf_upload",
    )
    hf_upload: str | None = changeable(None, description="Hub repository to upload exports to: owner/name[@revision]")
    hf_save_dtype: Literal["float32", "bfloat16"] | None = changeable(
        None, description="Dtype of exported weights, also in `lmtrain export-hf`; null: dtype of the parameters"
    )
