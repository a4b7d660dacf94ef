"""Llama: the ways to run it agree, documents are kept apart, initial values are as the docstring says."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.hf.key_map import flatten
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.llama.model import LlamaLM

SIZES = {"hidden_dim": 16, "intermediate_dim": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3, "seq_len": 8}
VOCAB = 24
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 8))


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    """Tiny programs run for microseconds; what takes time is optimizing them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def model(**changes):
    return LlamaLM(LlamaConfig(**SIZES | changes), VOCAB)


def random_params(lm):
    shapes = nn.meta.unbox(jax.eval_shape(lm.init, jax.random.key(0), TOKENS))["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda p: (rng.normal(size=p.shape) * 0.4).astype(np.float32), shapes)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": "all", "norm_position": "post"}], ids=["llama", "olmo2"])
def test_scan_unrolled_and_remat_give_the_same_outputs_and_gradients(changes):
    params = random_params(model(**changes))
    weights = np.random.default_rng(2).normal(size=(2, 8, 16)).astype(np.float32)
    results = []
    for scan, remat in itertools.product([True, False], repeat=2):
        lm = model(scan_layers=scan, gradient_checkpointing=remat, **changes)

        def loss(p, lm=lm):
            hidden = lm.apply({"params": p}, TOKENS, True, method="hidden")
            return (hidden * weights).sum(), hidden

        results.append(jax.jit(jax.grad(loss, has_aux=True))(params))
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_documents_in_one_sequence_know_nothing_of_one_another():
    lm = model()
    params = random_params(lm)
    segments = np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 6, 6, 6]])

    def gradient(segments):
        def second(params):
            hidden = lm.apply({"params": params}, np.arange(16).reshape(2, 8), True, segments, method="hidden")
            return (hidden[0, 3:7] ** 3).sum()

        return np.abs(np.asarray(jax.grad(second)(params)["tokens"]["embedding"])).sum(axis=1)

    assert np.flatnonzero(gradient(segments)).tolist() == [3, 4, 5, 6]
    assert np.flatnonzero(gradient(None)).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_initial_values_follow_the_docstring():
    lm = model(hidden_dim=64, intermediate_dim=96, initializer_range=0.05, use_bias=True)
    params = flatten(nn.meta.unbox(lm.init(jax.random.key(0), TOKENS))["params"])
    for path, value in params.items():
        if path.endswith("scale"):
            assert (value == 1).all(), path
        elif path.endswith("bias"):
            assert (value == 0).all(), path
        else:
            assert float(jnp.std(value)) == pytest.approx(0.05, rel=0.1), path
            assert abs(float(jnp.mean(value))) < 0.01, path
    kernels = params["blocks/attn/q/kernel"]
    assert not np.array_equal(kernels[0], kernels[1])  # layers differ


def test_half_precision_stays_half():
    lm = model()
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), random_params(lm))
    assert lm.apply({"params": half}, TOKENS, True, method="hidden").dtype == jnp.bfloat16
    assert lm.apply({"params": half}, TOKENS).dtype == jnp.float32
