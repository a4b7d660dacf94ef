"""Settings of GPT-2: what is refused, with which words, and what follows from what."""

import math

import pytest
from pydantic import ValidationError

from lmtrain.config.errors import UserError
from lmtrain.config.load import load_config
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.run_config import RunConfig


def test_the_defaults_are_the_124m_model():
    c = Gpt2Config()
    assert (c.seq_len, c.hidden_dim, c.num_layers, c.num_heads, c.head_dim, c.mlp_dim) == (1024, 768, 12, 12, 64, 3072)
    assert not c.has_dropout


@pytest.mark.parametrize(
    "bad",
    [
        {"seq_len": 1},
        {"seq_len": True},
        {"seq_len": 32.5},
        {"seq_len": None},
        {"hidden_dim": 0},
        {"hidden_dim": -8},
        {"num_layers": 0},
        {"num_heads": 0},
        {"num_heads": "zwölf"},
        {"mlp_scale": 0},
        {"initializer_range": 0},
        {"initializer_range": math.nan},
        {"initializer_range": math.inf},
        {"layer_norm_epsilon": -1e-5},
        {"embed_pdrop": 1},
        {"resid_pdrop": -0.1},
        {"attn_pdrop": math.nan},
        {"attn_pdrop": False},
        {"scan_layers": "perhaps"},
        {"type": "gpt3"},
        {"dropout": 0.1},
    ],
    ids=str,
)
def test_values_that_make_no_model_are_refused(bad):
    with pytest.raises(ValidationError) as caught:
        Gpt2Config(**bad)
    assert [problem["loc"] for problem in caught.value.errors()] == [(next(iter(bad)),)]


@pytest.mark.parametrize(
    ("width", "heads", "advice"),
    [(32, 5, "4 or 8"), (7, 3, "1 or 7"), (32, 33, "16 or 32"), (1, 2, "could be 1"), (768, 11, "8 or 12")],
)
def test_heads_that_do_not_divide_the_width_are_refused_with_advice(width, heads, advice):
    with pytest.raises(ValidationError, match=f"hidden_dim {width} is not a multiple of num_heads {heads}.*{advice}"):
        Gpt2Config(hidden_dim=width, num_heads=heads)


def test_a_user_sees_the_file_the_section_and_the_advice(settings, write_config):
    settings["model"]["num_heads"] = 5
    with pytest.raises(UserError, match=r"(?s)tiny\.yaml.*model.*num_heads 5; num_heads could be 4 or 8"):
        load_config(RunConfig, str(write_config(settings)))


@pytest.mark.parametrize("name", ["embed_pdrop", "resid_pdrop", "attn_pdrop"])
def test_any_dropout_counts_as_dropout(name):
    assert Gpt2Config(**{name: 0.01}).has_dropout


def test_the_mlp_scales_the_width():
    assert Gpt2Config(hidden_dim=10, num_heads=5, mlp_scale=3).mlp_dim == 30
    assert Gpt2Config(hidden_dim=10, num_heads=5).head_dim == 2


def test_settings_do_not_change_after_loading():
    with pytest.raises(ValidationError, match="frozen"):
        Gpt2Config().num_layers = 3
