"""The chunked loss and its gradients equal the naive formula, for any number of chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.interface import Head, LogitCap
from lmtrain.objectives.cross_entropy import CrossEntropyRow, next_token_targets
from lmtrain.objectives.row_losses import sum_of_row_losses

B, S, D, V = 2, 6, 5, 12
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


def summed_cross_entropy(hidden, head, targets, weights, vocab_size=None, row=CrossEntropyRow()):  # noqa: B008
    return sum_of_row_losses(row, Head(hidden, head, vocab_size), targets, weights)


def naive(hidden, head, targets, mask, z=0.0, smoothing=0.0):
    """The loss and its gradients with respect to hidden and head, in numpy and float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64).T
    highest = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - highest).sum(-1)) + highest[..., 0]
    probabilities = np.exp(logits - log_sum[..., None])
    one_hot = (1 - smoothing) * np.eye(V)[targets] + smoothing / V
    loss = ((log_sum - (logits * one_hot).sum(-1) + z * log_sum**2) * mask).sum()
    d_logits = (probabilities * (1 + 2 * z * log_sum[..., None]) - one_hot) * mask[..., None]
    return loss, d_logits @ head, np.einsum("bsv,bsd->vd", d_logits, hidden)


def test_values_and_gradients_equal_the_naive_formula(chunks):
    value_alone, value_and_gradients = (
        jax.jit(function) for function in (summed_cross_entropy, jax.value_and_grad(summed_cross_entropy, (0, 1)))
    )
    for mask in MASKS.values():
        loss, d_hidden, d_head = naive(HIDDEN, HEAD, TARGETS, mask)
        value, gradients = value_and_gradients(HIDDEN, HEAD, TARGETS, mask)
        assert float(value) == pytest.approx(loss, rel=1e-5)
        assert float(value_alone(HIDDEN, HEAD, TARGETS, mask)) == pytest.approx(loss, rel=1e-5)
        np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradients[1], d_head, rtol=1e-4, atol=1e-5)


FORMULAS = {"tanh": lambda x: 1.5 * jnp.tanh(x / 1.5), "rsqrt": lambda x: 1.5 * x / jnp.sqrt(x**2 + 1.5**2)}


@pytest.mark.parametrize("vocab_size", [V, V - 3])
@pytest.mark.parametrize("kind", FORMULAS)
def test_logits_with_a_bias_and_a_cap(chunks, vocab_size, kind):
    """Value and gradients, by JAX's own derivatives."""
    mask, targets = MASKS["some"], TARGETS % vocab_size

    def plain(hidden, head, bias):
        logits = FORMULAS[kind](jnp.einsum("bsd,vd->bsv", hidden, head[:vocab_size]) + bias[:vocab_size])
        return -(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)[..., 0] * mask).sum()

    def capped(hidden, head, bias):
        of = Head(hidden, head, vocab_size, LogitCap(1.5, kind), bias)
        return sum_of_row_losses(CrossEntropyRow(), of, targets, mask)

    arrays = HIDDEN, HEAD, HEAD[:, 0] * 3
    (value, found), (loss, expected) = (jax.value_and_grad(f, (0, 1, 2))(*arrays) for f in (capped, plain))
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    assert float(capped(*arrays)) == pytest.approx(float(loss), rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_scale_with_the_upstream_gradient(chunks):
    _, d_hidden, _ = naive(HIDDEN, HEAD, TARGETS, MASKS["some"])
    gradient = jax.jit(jax.grad(lambda h: -3.0 * summed_cross_entropy(h, HEAD, TARGETS, MASKS["some"])))(HIDDEN)
    np.testing.assert_allclose(gradient, -3.0 * d_hidden, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_close_and_gradients_have_its_dtype(chunks):
    half = [np.asarray(x, jnp.bfloat16) for x in (HIDDEN, HEAD)]
    loss, *expected = naive(*(np.asarray(x, np.float32) for x in half), TARGETS, MASKS["all"])
    value, gradients = jax.jit(jax.value_and_grad(summed_cross_entropy, (0, 1)))(*half, TARGETS, MASKS["all"])
    assert value.dtype == jnp.float32
    assert float(value) == pytest.approx(loss, rel=0.01)
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == jnp.bfloat16
        assert np.abs(np.asarray(gradient, np.float32) - exact).max() < 0.02 * np.abs(exact).max()


def test_huge_logits_give_finite_loss_and_gradients():
    value, gradient = jax.value_and_grad(summed_cross_entropy)(HIDDEN * 1e4, HEAD, TARGETS, MASKS["all"])
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


WEIGHTS = RNG.uniform(0.1, 3, (B, S)).astype(np.float32) * MASKS["some"]


@pytest.mark.parametrize("chunks", [12, 5], indirect=True, ids=lambda rows: f"chunks of {rows}")
@pytest.mark.parametrize("weights", [MASKS["some"], WEIGHTS], ids=["mask", "weights"])
@pytest.mark.parametrize(("z", "smoothing"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (0.3, 0.9)])
def test_z_loss_label_smoothing_and_weights_equal_the_naive_formula(chunks, z, smoothing, weights):
    loss, d_hidden, d_head = naive(HIDDEN, HEAD, TARGETS, weights, z, smoothing)

    def ours(hidden, head):
        return summed_cross_entropy(hidden, head, TARGETS, weights, None, CrossEntropyRow(z, smoothing))

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(HIDDEN, HEAD)
    assert float(value) == pytest.approx(loss, rel=1e-5)
    assert float(jax.jit(ours)(HIDDEN, HEAD)) == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(gradients[0], d_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], d_head, rtol=1e-4, atol=1e-5)


def test_padding_of_the_vocabulary_changes_nothing_and_gets_no_gradient(chunks):
    """Even if the padding's logits would be the largest."""
    head = np.concatenate([HEAD[:9], 100 * np.ones((3, D), np.float32)])
    targets = TARGETS % 9

    def ours(hidden, head):
        return summed_cross_entropy(hidden, head, targets, MASKS["all"], vocab_size=9, row=CrossEntropyRow(0.1, 0.2))

    def without(hidden, head):
        return summed_cross_entropy(hidden, head, targets, MASKS["all"], row=CrossEntropyRow(0.1, 0.2))

    value, (d_hidden, d_head) = jax.jit(jax.value_and_grad(ours, (0, 1)))(HIDDEN, head)
    expected, (e_hidden, e_head) = jax.jit(jax.value_and_grad(without, (0, 1)))(HIDDEN, HEAD[:9])
    assert float(value) == pytest.approx(float(expected), rel=1e-6)
    np.testing.assert_allclose(d_hidden, e_hidden, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_head[:9], e_head, rtol=1e-5, atol=1e-5)
    assert not d_head[9:].any()


def test_targets_are_the_next_tokens():
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(next_token_targets(tokens)[:, :-1], tokens[:, 1:])
