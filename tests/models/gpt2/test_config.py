"""Settings of GPT-2: defaults, derived sizes, refusals."""

import pytest
from pydantic import ValidationError

from lmtrain.models.gpt2.config import Gpt2Config


def test_the_defaults_are_the_124m_model():
    c = Gpt2Config()
    assert (c.hidden_dim, c.num_layers, c.num_heads, c.seq_len) == (768, 12, 12, 1024)
    assert (c.head_width, c.mlp_dim) == (64, 3072)


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 1},
        {"hidden_dim": 0},
        {"num_layers": 0},
        {"num_heads": 0},
        {"num_heads": -1},
        {"mlp_scale": 0},
        {"mlp_scale": 2.5},
        {"num_layers": True},
        {"embed_pdrop": 1.0},
        {"resid_pdrop": -0.1},
        {"attn_pdrop": "much"},
        {"initializer_range": 0.0},
        {"initializer_range": float("nan")},
        {"layer_norm_epsilon": 0},
        {"type": "llama"},
        {"hidden": 8},
    ],
)
def test_invalid_values_and_unknown_names_are_refused(change):
    with pytest.raises(ValidationError):
        Gpt2Config(**change)


def test_the_mlp_s_width_is_a_multiple_unless_given():
    assert Gpt2Config(hidden_dim=48, num_heads=4, mlp_scale=3).mlp_dim == 144
    assert Gpt2Config(hidden_dim=48, num_heads=4, intermediate_dim=100).mlp_dim == 100
    with pytest.raises(ValidationError, match="intermediate_dim"):
        Gpt2Config(intermediate_dim=0)
