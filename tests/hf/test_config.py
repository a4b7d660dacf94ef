"""Settings of Hugging Face import and export."""

import pytest
from pydantic import ValidationError

from lmtrain.hf.config import HuggingFaceConfig


@pytest.mark.parametrize("change", [{"hf_save_steps": 0}, {"hf_save_dtype": "f16"}, {"initialize_from_hf": 3}])
def test_invalid_values_are_refused(change):
    with pytest.raises(ValidationError):
        HuggingFaceConfig(**change)
