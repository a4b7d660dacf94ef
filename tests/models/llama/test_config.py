"""Settings of the Llama family."""

import pytest
from pydantic import ValidationError

from lmtrain.models.llama.config import LlamaConfig


def test_the_defaults_are_the_7b_model():
    c = LlamaConfig()
    assert (c.hidden_dim, c.intermediate_dim, c.num_layers, c.num_heads, c.seq_len) == (4096, 11008, 32, 32, 2048)
    assert (c.num_kv_heads, c.head_dim, c.tie_word_embeddings, c.use_bias) == (None, None, False, False)
    assert c.activation_function == "silu"


@pytest.mark.parametrize(("kv_heads", "fits"), [(1, True), (8, True), (32, True), (5, False), (64, False)])
def test_key_and_value_heads_divide_the_heads(kv_heads, fits):
    if fits:
        assert LlamaConfig(num_kv_heads=kv_heads).num_kv_heads == kv_heads
    else:
        with pytest.raises(ValidationError, match=f"{kv_heads} does not divide num_heads 32; num_kv_heads could be"):
            LlamaConfig(num_kv_heads=kv_heads)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"type": "llama3"}, "required by rope type llama3"),
        ({"type": "yarn", "factor": 2}, "required by rope type yarn"),
        ({"factor": 2}, "rope type default"),
        ({"type": "ntk"}, "Input should be"),
        ({"type": "linear", "factor": 0.5}, "greater than or equal to 1"),
        ({"low_freq_factor": 4}, "not used by rope type default"),
        (
            {"type": "llama3", "original_seq_len": 64, "low_freq_factor": 4, "high_freq_factor": 4},
            "must be above low_freq",
        ),
    ],
)
def test_invalid_rope_scaling_is_refused(rope, message):
    with pytest.raises(ValidationError, match=message):
        LlamaConfig(rope=rope)
