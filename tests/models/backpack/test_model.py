"""Backpack: the weights of senses, dependencies of a sense. `tests/parity/test_backpack.py` compares its outputs."""

import jax
import numpy as np
import pytest
from models import quick

from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.backpack.model import BackpackLM
from lmtrain.models.params import flatten

SIZES = {"hidden_dim": 16, "num_heads": 2, "num_layers": 2, "seq_len": 10, "mlp_scale": 2, "num_senses": 4}
VOCAB = 20
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 10))


def model(**changes) -> BackpackLM:
    return BackpackLM(BackpackConfig(**SIZES | changes), VOCAB)


@pytest.fixture(scope="module")
def params():
    return quick.random_params(model())


def apply(lm: BackpackLM, params, method, *arguments):
    rngs = {"dropout": jax.random.key(0)}
    return jax.jit(lambda p: lm.apply({"params": p}, *arguments, method=method, rngs=rngs))(params)


def hidden(lm: BackpackLM, params, deterministic: bool = True) -> np.ndarray:
    return np.asarray(apply(lm, params, "hidden", TOKENS, deterministic))


@pytest.fixture(scope="module")
def same_for_all(params):
    """Parameters that give all tokens the same sense vectors [E, D], and these vectors."""
    vectors = np.random.default_rng(2).normal(size=(4, 16)).astype(np.float32) + 1
    network = params["senses"]["to_senses"]
    last = {"kernel": np.zeros_like(network["down"]["kernel"]), "bias": vectors}
    return params | {"senses": params["senses"] | {"to_senses": network | {"down": last}}}, vectors


def senses(lm: BackpackLM, tokens, deterministic: bool = True):
    """[B, S, E, D]"""
    return lm.senses(lm.tokens(tokens), deterministic)


def test_the_weights_of_each_sense_sum_to_one_without_dropout(same_for_all):
    """If all tokens have the same vectors, the output depends only on the sums of the weights."""
    params, vectors = same_for_all
    found = hidden(model(), params)
    np.testing.assert_allclose(found, np.tile(vectors.sum(0), (2, 10, 1)), rtol=1e-5, atol=1e-5)
    dropped = hidden(model(attn_pdrop=0.5), params, deterministic=False)
    assert np.abs(dropped - found).max() > 0.5


def test_sense_vectors_depend_only_on_the_token(params):
    """Not on its context or position, nor on parameters of the trunk."""
    tokens = np.array([[3, 1, 2, 3, 7], [9, 9, 3, 5, 3]])
    vectors = np.asarray(apply(model(), params, senses, tokens))
    of_three = vectors[tokens == 3]
    assert of_three.shape == (4, 4, 16)
    np.testing.assert_allclose(of_three, np.broadcast_to(of_three[0], of_three.shape), rtol=1e-6, atol=1e-6)
    assert np.abs(vectors[0, 0] - vectors[0, 1]).max() > 0.1
    assert np.abs(vectors[0, 0, 0] - vectors[0, 0, 1]).max() > 0.1

    def total(params):
        return model().apply({"params": params}, tokens, method=senses).sum()

    gradients = flatten(jax.jit(jax.grad(total))(params))
    reached = {path for path, gradient in gradients.items() if np.any(gradient)}
    assert reached == {"tokens/embedding"} | {path for path in gradients if path.startswith("senses/")}


@pytest.mark.parametrize(("name", "drops"), [("embed_pdrop", True), ("resid_pdrop", True), ("attn_pdrop", False)])
def test_the_sense_network_has_its_own_dropout(params, name, drops):
    lm = model(**{name: 0.5})
    kept, dropped = (np.asarray(apply(lm, params, senses, TOKENS, deterministic)) for deterministic in (True, False))
    assert (np.abs(dropped - kept).max() > 0.01) == drops
