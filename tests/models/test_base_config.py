"""Shared settings of all families: sizes that must divide, and a union discriminated by type."""

import pytest
from pydantic import TypeAdapter, ValidationError

from lmtrain.models.base_config import BaseModelConfig
from lmtrain.models.config import FAMILY_NAMES, ModelConfig
from lmtrain.runtime.errors import nearest_divisors

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
def test_gradient_checkpointing_and_scanned_layers_are_the_default(family):
    config = MODEL.validate_python({"type": family})
    assert (config.gradient_checkpointing, config.scan_layers) == (True, True)


@pytest.mark.parametrize("number", [1, 2, 9, 30, 97, 144])
def test_no_divisor_is_nearer_than_the_nearest(number):
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    for wanted in range(number + 3):
        near = nearest_divisors(number, wanted)
        assert near == sorted(near)
        distances = sorted(abs(n - wanted) for n in divisors)[:2]
        assert sorted(abs(n - wanted) for n in near) == distances


@pytest.mark.parametrize("change", [{"seq_len": 1}, {"hidden_dim": 0}, {"num_layers": 0}, {"num_heads": 0}])
def test_sizes_below_the_least_are_refused(change):
    with pytest.raises(ValidationError, match="greater than or equal to"):
        BaseModelConfig(**change)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_positions_are_32_bit_integers(family):
    with pytest.raises(ValidationError, match="less than 2147483648"):
        MODEL.validate_python({"type": family, "seq_len": 2**31})
