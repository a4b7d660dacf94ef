"""Settings of the Backpack family."""

import pytest
from pydantic import ValidationError

from lmtrain.models.backpack.config import BackpackConfig


def test_the_defaults_are_those_of_the_published_model():
    c = BackpackConfig()
    assert (c.num_senses, c.sense_intermediate_scale, c.divide_by_num_senses) == (16, 4, False)
    assert c.scale_attn_by_inverse_layer_idx


def test_senses_divide_the_width():
    assert BackpackConfig(hidden_dim=48, num_heads=4, num_senses=6).num_senses == 6
    with pytest.raises(ValidationError, match="7 does not divide hidden_dim 48; num_senses could be 6 or 8"):
        BackpackConfig(hidden_dim=48, num_heads=4, num_senses=7)
