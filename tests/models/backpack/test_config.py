"""Settings of the Backpack family."""

import pytest
from pydantic import ValidationError

from lmtrain.models.backpack.config import BackpackConfig


def test_the_defaults_are_the_published_model():
    c = BackpackConfig()
    assert (c.num_senses, c.sense_intermediate_scale, c.divide_by_num_senses) == (16, 4, False)
    assert c.scale_attn_by_inverse_layer_idx


def test_senses_divide_the_width():
    assert BackpackConfig(hidden_dim=48, num_heads=4, num_senses=6).num_senses == 6
    with pytest.raises(ValidationError, match="7 does not divide hidden_dim 48; num_senses could be 6 or 8"):
        BackpackConfig(hidden_dim=48, num_heads=4, num_senses=7)


def test_widths_of_both_mlps():
    c = BackpackConfig(hidden_dim=48, num_heads=4, num_senses=6, intermediate_dim=100, sense_intermediate_scale=2)
    assert (c.mlp_dim, c.sense_width) == (100, 8)
    assert BackpackConfig(hidden_dim=48, num_heads=4, mlp_scale=3).mlp_dim == 144


@pytest.mark.parametrize("change", [{"num_senses": 0}, {"sense_intermediate_scale": 0}, {"intermediate_dim": 0}])
def test_invalid_values_are_refused(change):
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        BackpackConfig(**change)


def test_a_backpack_has_no_setting_for_an_untied_head():
    with pytest.raises(ValidationError, match="Extra inputs"):
        BackpackConfig(tie_word_embeddings=False)
