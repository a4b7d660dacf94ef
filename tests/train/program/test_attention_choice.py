"""Which attention a run takes, by what its config asks for and whether it trains."""

import pytest

from lmtrain.config.errors import UserError
from lmtrain.run.config import RunConfig
from lmtrain.train.program.program import attention_choice


def config(**model):
    return RunConfig.model_validate({"model": {"type": "gpt2", **model}, "trainer": {"mp": "bf16"}})


def test_dropout_keeps_no_kernel_from_evaluation_and_sampling():
    """Which have none, and would otherwise refuse a backend that the run may use for them."""
    dropping = config(attn_pdrop=0.1, attn_backend="blockwise")
    with pytest.raises(UserError, match="dropout on the attention weights"):
        attention_choice(dropping, "cpu")
    assert attention_choice(dropping, "cpu", trains=False)[0] == "blockwise"
    assert attention_choice(config(attn_pdrop=0.1), "gpu")[0] == "xla"
    assert attention_choice(config(attn_pdrop=0.1), "gpu", trains=False)[0] == "triton"
