"""Import of a `config.json` of Llama's family: as transformers 5 reads it, or refused if it is ambiguous."""

import pytest

from lmtrain.config.errors import UserError
from lmtrain.models.llama.hf import from_hf_config

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def read(kind="llama", **values):
    return from_hf_config({"model_type": kind, **SIZES, **values})


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("llama", {}, "silu"),
        ("llama", {"hidden_act": "gelu", "hidden_activation": "relu"}, "gelu"),  # hidden_activation is only for Gemma
        ("gemma", {}, "gelu_new"),
        ("gemma", {"hidden_act": "gelu"}, "gelu_new"),  # in the first files, which use the approximation
        ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_new"),
        ("gemma", {"hidden_activation": None, "hidden_act": "relu"}, "relu"),
    ],
)
def test_the_activation(kind, values, expected):
    assert read(kind, **values)["activation_function"] == expected


def test_gemmas_two_activations_must_not_contradict_each_other():
    with pytest.raises(UserError, match="hidden_act gelu_pytorch_tanh and hidden_activation relu contradict"):
        read("gemma", hidden_act="gelu_pytorch_tanh", hidden_activation="relu")


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 8, "layer_types": [SLIDING] * 4}, 8),
        ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 4}, None),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, None),  # default: from layer 28 on
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
    ],
)
def test_the_window(kind, values, expected):
    assert read(kind, **values)["sliding_window"] == expected


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("mistral", {"layer_types": [FULL, SLIDING, FULL, SLIDING]}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
    ],
)
def test_windows_in_some_layers_are_refused(kind, values):
    with pytest.raises(UserError, match="a sliding window in 2 of 4 layers only"):
        read(kind, sliding_window=8, **values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"type": "default", "theta": 10_000.0}),
        ({"rope_theta": 5e5}, {"type": "default", "theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"type": "default", "theta": 5e5}),
        # rope_scaling takes precedence over rope_parameters
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            },
            {"type": "linear", "theta": 10_000.0, "factor": 4.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
            {"type": "yarn", "theta": 10_000.0, "factor": 4.0, "original_seq_len": 16},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 16},
            {"type": "yarn", "theta": 10_000.0, "factor": 2.0, "original_seq_len": 16},
        ),
    ],
)
def test_the_rotary_positions(values, expected):
    assert read(**values)["rope"] == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "rope linear requires factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "rope llama3 requires low_freq_factor, high_freq_factor",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope yarn requires factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5e5}},
            "add rope_theta to rope_scaling",
        ),
    ],
)
def test_incomplete_or_ambiguous_rope_settings_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        read(**values)
