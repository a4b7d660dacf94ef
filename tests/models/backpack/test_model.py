"""Backpack: the weighted sum of senses, dependencies of a sense, packed documents, initial values."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick

from lmtrain.hf.key_map import flatten
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.backpack.model import BackpackLM
from lmtrain.models.interface import Documents

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


def hidden(lm: BackpackLM, params, tokens=TOKENS, deterministic: bool = True, segments=None) -> np.ndarray:
    return np.asarray(apply(lm, params, "hidden", tokens, deterministic, segments))


@pytest.fixture(scope="module")
def plain(params) -> np.ndarray:
    """Hidden states with the default settings."""
    return hidden(model(), params)


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


def queries_and_keys(lm: BackpackLM, tokens):
    """Queries and keys [B, S, 2, E, C] of the senses, from the trunk's output."""
    x = lm.tokens(tokens) + lm.positions.embedding[: tokens.shape[1]]
    x, _ = lm.blocks(x, jnp.arange(lm.config.num_layers), True, Documents())
    return lm.weigh(lm.norm_final(x))


def test_hidden_states_are_the_sum_over_senses_and_positions_of_weights_times_vectors(params, plain):
    vectors, both = (np.asarray(apply(model(), params, part, TOKENS)) for part in (senses, queries_and_keys))
    q, k = both[:, :, 0], both[:, :, 1]
    expected = np.zeros((2, 10, 16))
    for s in range(10):
        scores = np.einsum("bec,btec->bet", q[:, s], k[:, : s + 1]) / 2  # senses are 4 wide
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected[:, s] = np.einsum("bet,bted->bd", weights, vectors[:, : s + 1])
    np.testing.assert_allclose(plain, expected, rtol=1e-4, atol=1e-4)
    divided = hidden(model(divide_by_num_senses=True), params)
    np.testing.assert_allclose(divided, expected / 4, rtol=1e-4, atol=1e-4)


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


def test_packed_documents_do_not_influence_each_other(params):
    lm = model()

    @jax.jit
    def gradient(params, segments):
        def second(params):
            states = lm.apply({"params": params}, np.arange(16).reshape(2, 8), True, segments, method="hidden")
            return (states[0, 3:7] ** 3).sum()

        return jax.grad(second)(params)["tokens"]["embedding"]

    def reached(segments):
        return np.flatnonzero(np.abs(np.asarray(gradient(params, segments))).sum(axis=1)).tolist()

    assert reached(np.array([[0, 0, 0, 1, 1, 1, 1, 2], [5, 5, 5, 5, 5, 6, 6, 6]])) == [3, 4, 5, 6]
    assert reached(np.zeros((2, 8), int)) == [0, 1, 2, 3, 4, 5, 6]


def test_a_packed_document_equals_a_separate_one_with_the_same_positions(params):
    flat = params | {"positions": {"embedding": np.tile(params["positions"]["embedding"][0], (10, 1))}}
    packed = hidden(model(), flat, segments=np.repeat([[0, 1], [3, 2]], 5, axis=1))
    alone = hidden(model(), flat, TOKENS.reshape(4, 5))
    np.testing.assert_allclose(packed.reshape(4, 5, 16), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["embed_pdrop", "resid_pdrop", "attn_pdrop"])
def test_each_dropout_changes_training_and_not_evaluation(params, name):
    assert quick.changed_by_dropout(model(**{name: 0.5}), model(), params, TOKENS) > 0.01


def test_the_trunk_has_dropout_after_the_embeddings_too(params):
    """Only the trunk uses positions; their gradient is zero where they were dropped."""
    lm = model(embed_pdrop=0.5)

    def total(params):
        rngs = {"dropout": jax.random.key(0)}
        return (lm.apply({"params": params}, TOKENS[:1], False, method="hidden", rngs=rngs) ** 2).sum()

    gradient = jax.jit(jax.grad(total))(params)["positions"]["embedding"]
    assert 0.3 < np.mean(np.asarray(gradient) == 0) < 0.7


@pytest.mark.parametrize(("name", "drops"), [("embed_pdrop", True), ("resid_pdrop", True), ("attn_pdrop", False)])
def test_the_sense_network_has_its_own_dropout(params, name, drops):
    lm = model(**{name: 0.5})
    kept, dropped = (np.asarray(apply(lm, params, senses, TOKENS, deterministic)) for deterministic in (True, False))
    assert (np.abs(dropped - kept).max() > 0.01) == drops


def test_logits_are_products_with_the_embedding_table_without_a_norm(params, plain):
    logits = apply(model(), params, "__call__", TOKENS)
    np.testing.assert_allclose(logits, plain @ params["tokens"]["embedding"][:VOCAB].T, rtol=1e-4, atol=1e-4)


def test_initial_values_follow_the_docstring():
    config = BackpackConfig(**SIZES | {"hidden_dim": 64, "num_layers": 8, "seq_len": 256}, initializer_range=0.05)
    init = jax.jit(BackpackLM(config, 512).init)
    params = flatten(jax.device_get(nn.meta.unbox(init(jax.random.key(3), TOKENS[:, :2])))["params"])
    residual = 0.05 / 4  # sqrt(2 * 8 layers)
    spread = {
        "tokens/embedding": 0.05,
        "positions/embedding": 0.05,
        "blocks/attn/qkv/kernel": 0.05,
        "blocks/mlp/up/kernel": 0.05,
        "blocks/attn/out/kernel": residual,
        "blocks/mlp/down/kernel": residual,
        "weigh/kernel": 0.05,
        "senses/mlp/up/kernel": 0.05,
        "senses/mlp/down/kernel": 0.05 / 2**0.5,
        "senses/to_senses/up/kernel": 0.05,
        "senses/to_senses/down/kernel": 0.05,
    }
    for name, value in params.items():
        if name in spread:
            assert np.std(value) == pytest.approx(spread[name], rel=0.03), name
            assert abs(np.mean(value)) < 0.05 * spread[name], name
        else:
            assert np.all(value == (1.0 if name.endswith("scale") else 0.0)), name
    assert len(params) == 32
