"""Llama: packed documents, initial values of the docstring, half precision."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.hf.key_map import flatten
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaLM

SIZES = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3, "seq_len": 8}
VOCAB = 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))


def model(**changes):
    return LlamaLM(LlamaConfig(**SIZES | changes), VOCAB)


def test_packed_documents_do_not_influence_each_other():
    """The gradient of a document with respect to another's embeddings is zero; without segments, it is not."""
    lm = model()
    params = quick.random_params(lm)
    apart = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 6, 6, 6]])
    assert quick.reached_tokens(lm, params, apart) == [3, 4, 5, 6]
    together = [0, 1, 2, 3, 4, 5, 6]
    assert quick.reached_tokens(lm, params, None) == quick.reached_tokens(lm, params, np.zeros((2, 8), int)) == together


def test_initial_values_follow_the_docstring():
    lm = model(hidden_dim=64, intermediate_dim=96, initializer_range=0.05, use_bias=True)
    init = jax.jit(lm.init)
    params = flatten(jax.device_get(nn.meta.unbox(init(jax.random.key(0), TOKENS)))["params"])
    for path, value in params.items():
        if path.endswith("scale"):
            assert (value == 1).all(), path
        elif path.endswith("bias"):
            assert (value == 0).all(), path
        else:
            assert np.std(value) == pytest.approx(0.05, rel=0.1), path
            assert abs(np.mean(value)) < 0.01, path
    kernels = params["blocks/attn/q/kernel"]
    assert not np.array_equal(kernels[0], kernels[1])  # layers differ


def test_half_precision_stays_half():
    lm = model()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), quick.random_params(lm))
    hidden = jax.eval_shape(lambda p: lm.apply({"params": p}, TOKENS, True, method="hidden"), half)
    logits = jax.eval_shape(lambda p: lm.apply({"params": p}, TOKENS), half)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
