"""Settings of the MPT family."""

import pytest
from pydantic import ValidationError

from lmtrain.models.mpt.config import MptConfig


def test_the_defaults_are_the_published_models():
    c = MptConfig()
    assert (c.seq_len, c.mlp_scale, c.use_bias, c.alibi_bias_max, c.clip_qkv, c.softmax_scale) == (
        2048,
        4,
        False,
        8.0,
        None,
        None,
    )


@pytest.mark.parametrize("change", [{"clip_qkv": 0}, {"softmax_scale": -1}, {"alibi_bias_max": 0}, {"attn_pdrop": 1}])
def test_invalid_values_are_refused(change):
    with pytest.raises(ValidationError):
        MptConfig(**change)


def test_initializer_range_requires_init_scheme_normal():
    assert MptConfig().init_scheme == "kaiming"
    assert MptConfig(init_scheme="normal", initializer_range=0.01).initializer_range == 0.01
    for scheme in ({}, {"init_scheme": "kaiming"}):
        with pytest.raises(ValidationError, match="init_scheme: normal") as refused:
            MptConfig(**scheme, initializer_range=0.01)
        assert refused.value.errors()[0]["ctx"]["field"] == "initializer_range"
    with pytest.raises(ValidationError, match="init_scheme"):
        MptConfig(init_scheme="xavier")
