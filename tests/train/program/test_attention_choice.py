"""The attention backend of a run, by its config and whether it trains."""

import pytest

from lmtrain.config.errors import UserError
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import attention_choice


def config(**model):
    return RunConfig.model_validate({"model": {"type": "gpt2", **model}, "trainer": {"mp": "bf16"}})


def test_dropout_does_not_restrict_the_backend_of_evaluation_and_sampling():
    """They run without dropout, so a backend that does not support it is allowed."""
    dropping = config(attn_pdrop=0.1, attn_backend="blockwise")
    with pytest.raises(UserError, match="dropout on the attention weights"):
        attention_choice(dropping, "cpu")
    assert attention_choice(dropping, "cpu", trains=False)[0] == "blockwise"
    assert attention_choice(config(attn_pdrop=0.1), "gpu")[0] == "xla"
    assert attention_choice(config(attn_pdrop=0.1), "gpu", trains=False)[0] == "triton"
