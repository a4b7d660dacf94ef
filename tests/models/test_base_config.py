"""What all families share: sizes that must divide, and a union told apart by type."""

import pytest
from pydantic import TypeAdapter, ValidationError

from lmtrain.models.config import FAMILY_NAMES, ModelConfig

MODEL = TypeAdapter(ModelConfig)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_heads_divide_the_width_in_every_family(family):
    with pytest.raises(ValidationError, match="7 does not divide hidden_dim 64; num_heads could be 4 or 8"):
        MODEL.validate_python({"type": family, "hidden_dim": 64, "num_heads": 7})


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_setting_of_another_family_is_refused(family):
    foreign = "rope" if family != "llama" else "mlp_scale"
    with pytest.raises(ValidationError, match="Extra inputs"):
        MODEL.validate_python({"type": family, foreign: 1})


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_gradients_are_checkpointed_and_layers_scanned_unless_asked_otherwise(family):
    config = MODEL.validate_python({"type": family})
    assert (config.gradient_checkpointing, config.scan_layers) == (True, True)
