"""Estimates of the Hessian diagonal against the exact one of a tiny model's mean loss, within statistical bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import quick

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.registry import build_model
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.train.step.hessian import estimate_hessian

VOCAB = 7
CONFIG = Gpt2Config(
    hidden_dim=4, num_heads=2, num_layers=1, seq_len=5, mlp_scale=2, gradient_checkpointing=False, scan_layers=False
)
MODEL = quick.TwoTokenLM(4, VOCAB)
WITH_ATTENTION = build_model(CONFIG.model_copy(update={"pad_vocab_to_multiple_of": 4}), VOCAB)
RNG = np.random.default_rng(0)
BATCH = {
    "tokens": RNG.integers(0, VOCAB, (4, 5)).astype(np.int32),
    # rows of 4, 3, 1 and 0 targets
    "loss_mask": np.arange(5) < np.array([[4], [3], [1], [0]]),
}
COUNT = 8


VALUES = quick.random_params(MODEL, 0.7)
VALUES_WITH_ATTENTION = quick.random_params(WITH_ATTENTION, 0.7)
KEYS = jax.random.split(jax.random.key(5), 6000)


def estimate(method: str, key, microbatches: int = 1, batch=BATCH):
    return estimate_hessian(method, MODEL, CrossEntropy(), VALUES, batch, key, microbatches)


@functools.cache
def compiled(method: str, microbatches: int):
    return jax.jit(lambda batch, key: estimate(method, key, microbatches, batch))


def one_estimate(method: str, microbatches: int = 1, batch=BATCH):
    """An estimate with the first of the keys below."""
    if microbatches == 1:
        return jax.tree.map(lambda leaf: leaf[0], draws(method))
    return jax.device_get(compiled(method, microbatches)(batch, KEYS[0]))


@functools.cache
def draws(method: str):
    """Estimates with each of the keys."""
    return jax.device_get(jax.jit(lambda: jax.lax.map(lambda key: estimate(method, key), KEYS, batch_size=200))())


# --- the leaves that exact values are computed for


def leaves(params):
    return jnp.concatenate([params["mix"]["kernel"].ravel(), params["mix"]["bias"]])


def logits(vector):
    params = VALUES | {"mix": {"kernel": vector[:16].reshape(4, 4), "bias": vector[16:]}}
    return MODEL.apply({"params": params}, BATCH["tokens"])[:, :-1]


def exact_hessian():
    def mean_loss(vector):
        log_probs = jax.nn.log_softmax(logits(vector))
        chosen = jnp.take_along_axis(log_probs, BATCH["tokens"][:, 1:, None], axis=-1)[..., 0]
        return -(chosen * BATCH["loss_mask"][:, :-1]).sum() / COUNT

    return np.diag(jax.jit(jax.hessian(mean_loss))(leaves(VALUES)))


def exact_gauss_newton():
    """The mean over targets of J^T (diag(p) - p p^T) J, where J is the logits' Jacobian; in float64."""
    found, jacobian = jax.jit(lambda vector: (logits(vector), jax.jacrev(logits)(vector)))(leaves(VALUES))
    found, jacobian = np.float64(found), np.float64(jacobian)
    p = np.exp(found) / np.exp(found).sum(-1, keepdims=True)
    second = np.einsum("bsv,bsvi->bsi", p, jacobian**2)
    first = np.einsum("bsv,bsvi->bsi", p, jacobian)
    return ((second - first**2) * BATCH["loss_mask"][:, :-1, None]).sum((0, 1)) / COUNT


def assert_mean_is(estimates, expected, precision: float):
    """The mean is within five standard errors, and these are small relative to the largest value."""
    found = np.float64(jax.vmap(leaves)(estimates))
    error = found.std(0) / len(found) ** 0.5
    assert (np.abs(found.mean(0) - expected) < 5 * error + 1e-6).all(), (found.mean(0), expected, error)
    assert np.linalg.norm(error) < precision * np.linalg.norm(expected)


@pytest.mark.long
def test_the_mean_of_hutchinson_is_the_diagonal_of_the_hessian():
    expected = exact_hessian()
    assert expected.min() < 0 < expected.max()
    assert_mean_is(draws("hutchinson"), expected, 0.15)


def test_the_mean_of_gauss_newton_bartlett_is_the_diagonal_of_the_gauss_newton_matrix():
    assert_mean_is(draws("gauss_newton_bartlett"), exact_gauss_newton(), 0.1)


def test_gauss_newton_bartlett_is_never_negative_and_hutchinson_can_be():
    bartlett = jax.tree.leaves(one_estimate("gauss_newton_bartlett"))
    assert min(leaf.min() for leaf in bartlett) >= 0
    assert all(leaf.max() > 0 for leaf in bartlett)
    assert min(leaf.min() for leaf in jax.tree.leaves(one_estimate("hutchinson"))) < 0


@pytest.mark.parametrize("microbatches", [2, 4])
def test_hutchinson_is_the_same_for_any_number_of_microbatches(microbatches):
    """Even with uneven masks: the direction is drawn once, and the product with the Hessian is a sum."""
    whole, parts = one_estimate("hutchinson"), one_estimate("hutchinson", microbatches)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=5e-5 * np.abs(one).max())


@pytest.mark.long
def test_hutchinson_of_a_gpt2_is_the_direction_times_the_product_of_hessian_and_direction():
    def mean_loss(params):
        log_probs = jax.nn.log_softmax(WITH_ATTENTION.apply({"params": params}, BATCH["tokens"])[:, :-1])
        chosen = jnp.take_along_axis(log_probs, BATCH["tokens"][:, 1:, None], axis=-1)[..., 0]
        return -(chosen * BATCH["loss_mask"][:, :-1]).sum() / COUNT

    values = VALUES_WITH_ATTENTION
    direction = optax.tree.random_like(jax.random.split(KEYS[0])[0], values, jax.random.normal)
    exact = jax.jit(lambda: jax.jvp(jax.grad(mean_loss), (values,), (direction,))[1])()
    found = jax.jit(lambda: estimate_hessian("hutchinson", WITH_ATTENTION, CrossEntropy(), values, BATCH, KEYS[0], 1))()
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(found))
    jax.tree.map(
        lambda a, u, hu: np.testing.assert_allclose(a, u * hu, rtol=1e-3, atol=1e-5 * largest), found, direction, exact
    )


@pytest.mark.long
@pytest.mark.parametrize("method", ["hutchinson", "gauss_newton_bartlett"])
def test_blockwise_attention_gives_the_same_estimate(method):
    def run(backend):
        model = WITH_ATTENTION.clone(attention=backend)
        estimate = lambda: estimate_hessian(method, model, CrossEntropy(), VALUES_WITH_ATTENTION, BATCH, KEYS[0], 1)  # noqa: E731
        return jax.jit(estimate)()

    plain, blockwise = run("xla"), run("blockwise")
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(blockwise), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4 * np.abs(one).max())


@pytest.mark.long
@pytest.mark.parametrize("method", ["hutchinson", "gauss_newton_bartlett"])
def test_with_bfloat16_parameters_it_has_their_shapes_and_is_float32(method):
    half = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), VALUES_WITH_ATTENTION)
    found = jax.eval_shape(
        lambda params: estimate_hessian(method, WITH_ATTENTION, CrossEntropy(), params, BATCH, jax.random.key(0), 2),
        half,
    )
    assert jax.tree.map(lambda leaf: leaf.shape, found) == jax.tree.map(np.shape, VALUES_WITH_ATTENTION)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}


def test_gauss_newton_bartlett_draws_targets_for_each_microbatch():
    """Two microbatches of the same tokens: with the same draws, their gradients would be equal, and n g^2 twice that of
    one microbatch alone."""
    tokens = np.repeat(BATCH["tokens"][:2], 2, axis=0)  # microbatch i takes rows i, i + 2
    mask = np.repeat(BATCH["loss_mask"][:2], 2, axis=0)
    alone = mask * np.array([[True], [False], [True], [False]])
    both, one = (
        leaves(one_estimate("gauss_newton_bartlett", 2, batch={"tokens": tokens, "loss_mask": m}))
        for m in (mask, alone)
    )
    assert one.min() > 0
    assert not np.allclose(both, 2 * one, rtol=1e-2)


@pytest.mark.parametrize("method", ["hutchinson", "gauss_newton_bartlett"])
def test_without_targets_it_is_zero(method):
    empty = BATCH | {"loss_mask": np.zeros_like(BATCH["loss_mask"])}
    for leaf in jax.tree.leaves(one_estimate(method, 2, batch=empty)):
        np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
