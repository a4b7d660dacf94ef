"""GPT-2: float32 attention. `tests/models/test_decoder.py` tests what it shares with other families."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM

SIZES = {"hidden_dim": 16, "num_heads": 2, "num_layers": 3, "seq_len": 8, "mlp_scale": 2}
VOCAB = 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))


def model(**changes) -> Gpt2LM:
    return Gpt2LM(Gpt2Config(**SIZES | changes), VOCAB)


@pytest.fixture(scope="module")
def params():
    return quick.random_params(model())


@pytest.mark.parametrize("method", ["hidden", "extend"])
def test_upcast_attention_changes_only_half_precision(params, method):
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def products(values, upcast: bool) -> int:
        """Number of matrix products in float32."""
        lm = model(upcast_attn=upcast, scan_layers=False, gradient_checkpointing=False)
        more = {
            "hidden": lambda: (True,),
            "extend": lambda: (lm.apply({"params": values}, 2, 8, method="empty_cache"), 0),
        }
        text = (
            jax.jit(lambda p: lm.apply({"params": p}, TOKENS, *more[method](), method=method)).lower(values).as_text()
        )
        return len(re.findall(r"stablehlo.dot_general.*-> tensor<\S+xf32>", text))

    assert products(params, False) == products(params, True)
    assert products(half, False) == 0 < products(half, True)
