"""Settings of Hugging Face import and export."""

import pytest
from pydantic import ValidationError

from lmtrain.hf.config import HuggingFaceConfig


@pytest.mark.parametrize("value", [True, False, "mosaicml/mpt-7b", "mosaicml/mpt-7b@deadbeef", "/a/folder"])
def test_initial_weights_are_named_or_the_default_of_the_family(value):
    assert HuggingFaceConfig(initialize_from_hf=value).initialize_from_hf == value


@pytest.mark.parametrize("change", [{"hf_save_steps": 0}, {"hf_save_dtype": "f16"}, {"initialize_from_hf": 3}])
def test_invalid_values_are_refused(change):
    with pytest.raises(ValidationError):
        HuggingFaceConfig(**change)
