"""The chunked loss and its gradients are those of the naive formula, for any number of chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lmtrain.train.loss as loss_module
from lmtrain.train.loss import next_token_targets, summed_cross_entropy

B, S, D, V = 2, 6, 5, 11
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(B, S, D)).astype(np.float32)
HEAD = RNG.normal(size=(V, D)).astype(np.float32)
TARGETS = RNG.integers(0, V, (B, S))
MASKS = {
    "all": np.ones((B, S), bool),
    "some": RNG.random((B, S)) < 0.5,
    "one": np.eye(B, S, 3, dtype=bool),
    "none": np.zeros((B, S), bool),
}


def naive(hidden, head, targets, mask):
    """In numpy and float64: the loss, and its gradients by hidden and head."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    one_hot = np.eye(V)[targets]
    loss = -(np.log((probabilities * one_hot).sum(-1)) * mask).sum()
    d_logits = (probabilities - one_hot) * mask[..., None]
    return loss, d_logits @ head, np.einsum("bsv,bsd->vd", d_logits, hidden)


@pytest.fixture(params=[1, 2, 3, 6])
def chunks(request, monkeypatch):
    """The loss in so many chunks."""
    monkeypatch.setattr(loss_module, "_LOGITS_PER_CHUNK", B * S * V // request.param)
    assert loss_module._num_chunks(B * S * V, S) == request.param
    return request.param


@pytest.mark.parametrize("mask", MASKS)
def test_value_and_gradients_are_those_of_the_naive_formula(chunks, mask):
    mask = MASKS[mask]
    loss, d_hidden, d_head = naive(HIDDEN, HEAD, TARGETS, mask)
    value, gradients = jax.value_and_grad(summed_cross_entropy, (0, 1))(HIDDEN, HEAD, TARGETS, mask)
    assert float(value) == pytest.approx(loss, rel=1e-5)
    assert float(summed_cross_entropy(HIDDEN, HEAD, TARGETS, mask)) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], d_head, rtol=1e-4, atol=1e-5)


def test_gradients_scale_with_what_comes_from_above(chunks):
    _, d_hidden, _ = naive(HIDDEN, HEAD, TARGETS, MASKS["some"])
    gradient = jax.grad(lambda h: -3.0 * summed_cross_entropy(h, HEAD, TARGETS, MASKS["some"]))(HIDDEN)
    np.testing.assert_allclose(gradient, -3.0 * d_hidden, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_close_and_gradients_have_its_type(chunks):
    half = [jnp.asarray(x, jnp.bfloat16) for x in (HIDDEN, HEAD)]
    loss, *expected = naive(*(np.asarray(x, np.float32) for x in half), TARGETS, MASKS["all"])
    value, gradients = jax.value_and_grad(summed_cross_entropy, (0, 1))(*half, TARGETS, MASKS["all"])
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(loss, rel=0.01)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == jnp.bfloat16
        assert np.abs(np.asarray(gradient, np.float32) - exact).max() < 0.02 * np.abs(exact).max()


def test_huge_logits_give_finite_loss_and_gradients():
    value, gradient = jax.value_and_grad(summed_cross_entropy)(HIDDEN * 1e4, HEAD, TARGETS, MASKS["all"])
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize(("logits", "length", "expected"), [(1, 8, 1), (100, 8, 1), (101, 8, 2), (250, 8, 4)])
def test_the_fewest_chunks_that_fit_and_divide(monkeypatch, logits, length, expected):
    monkeypatch.setattr(loss_module, "_LOGITS_PER_CHUNK", 100)
    assert loss_module._num_chunks(logits, length) == expected


@pytest.mark.parametrize(("logits", "length", "expected"), [(200, 7, 7), (10**9, 6, 6)])
def test_a_length_that_does_not_divide_takes_more_chunks_at_most_one_a_position(monkeypatch, logits, length, expected):
    monkeypatch.setattr(loss_module, "_LOGITS_PER_CHUNK", 100)
    assert loss_module._num_chunks(logits, length) == expected


def test_targets_are_the_next_tokens():
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(next_token_targets(tokens)[:, :-1], tokens[:, 1:])
