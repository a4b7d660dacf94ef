"""Models of other sizes have the proportions of the given one."""

import math

import pytest

from lmtrain.models.llama.config import LlamaConfig
from lmtrain.scaling.ladder import multiplying_parameters
from lmtrain.scaling.predict import scaled_model

SMALL = LlamaConfig(hidden_dim=64, intermediate_dim=176, num_heads=4, num_layers=4, seq_len=32)
LARGE = LlamaConfig(
    hidden_dim=1024, intermediate_dim=2816, num_heads=16, num_kv_heads=4, num_layers=16, seq_len=32
)  # fmt: skip


@pytest.mark.parametrize(("model", "vocab_size"), [(SMALL, 384), (LARGE, 32_000)])
@pytest.mark.parametrize(
    "factor",
    [
        *(0.5, 5, 13),
        pytest.param(35, marks=pytest.mark.long),
        pytest.param(60, marks=[pytest.mark.long, pytest.mark.release]),
    ],
)
def test_width_and_depth_grow_together(model, vocab_size, factor):
    parameters = factor * multiplying_parameters(model, vocab_size)
    found = scaled_model(model, parameters, vocab_size)
    assert multiplying_parameters(found, vocab_size) == pytest.approx(parameters, rel=0.35)
    assert found.hidden_dim / found.num_heads == model.hidden_dim / model.num_heads
    ratio = found.hidden_dim / found.num_layers / (model.hidden_dim / model.num_layers)
    assert abs(math.log(ratio)) < math.log(1.7)
