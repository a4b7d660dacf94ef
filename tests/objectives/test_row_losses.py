"""The chunked loss and its gradients equal the naive formula, for any number of chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lmtrain.objectives.logits as logits_module
from lmtrain.objectives.cross_entropy import CrossEntropyRow, next_token_targets
from lmtrain.objectives.logits import rows_at_once
from lmtrain.objectives.row_losses import sum_of_row_losses
from lmtrain.objectives.sample_targets import _BLOCK, sample_targets

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
    return sum_of_row_losses(row, hidden, head, targets, weights, vocab_size)


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


# rows of a chunk: all, half, one at a time, and sizes that do not divide the twelve rows, so the last chunk is padded
ROWS = [12, 6, 1, 5, 7]


@pytest.fixture(params=ROWS, ids=lambda rows: f"chunks of {rows}")
def chunks(request, monkeypatch):
    """Compute the loss in chunks of this number of rows."""
    monkeypatch.setattr(logits_module, "rows_at_once", lambda *sizes: request.param)
    return request.param


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


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(64 * 1024, 50304), (64 * 1021, 50304), (4 * 4093, 32000), (4093, 32000), (8 * 8192, 128256), (1000, 50304)],
)
def test_chunks_on_accelerators_have_about_a_thousand_rows_and_little_padding(kind, rows, vocab):
    """Also for prime sequence lengths."""
    size = rows_at_once(rows, vocab, kind)
    assert min(rows, 1024) <= size <= max(2**27 // vocab + 128, 1024)
    number = -(-rows // size)
    assert number * size - rows < max(0.06 * rows, 128)


@pytest.mark.parametrize(
    ("rows", "vocab", "expected"), [(100, 2**10, 100), (2**14, 2**10, 2**12), (2**10, 2**20, 64), (10, 2**22, 10)]
)
def test_chunks_on_a_cpu_fit_its_caches(rows, vocab, expected):
    assert rows_at_once(rows, vocab, "cpu") == expected


def test_targets_are_the_next_tokens():
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(next_token_targets(tokens)[:, :-1], tokens[:, 1:])


DRAWS = 4000
# 99.99% of chi-square values of 8 degrees of freedom are below 31.8; there are 12 positions, and the key is fixed
LARGEST_CHI_SQUARE = 31.8


def draw(hidden, head, vocab_size: int, number: int = DRAWS):
    """[number, B, S]"""
    keys = jax.random.split(jax.random.key(11), number)
    return np.asarray(jax.jit(jax.vmap(lambda key: sample_targets(hidden, head, key, vocab_size)))(keys))


def chi_square(counts, expected):
    return (np.square(counts - expected) / expected).sum(-1)


@pytest.mark.parametrize("chunks", [12, 5], indirect=True, ids=lambda rows: f"chunks of {rows}")
def test_sampled_targets_follow_the_softmax_of_each_position_and_are_never_padding(chunks):
    """Even though the padding's logits would be the largest."""
    head = np.concatenate([HEAD[:9] / 2, 100 * np.ones((3, D), np.float32)])
    drawn = draw(HIDDEN, head, 9)
    assert drawn.shape == (DRAWS, B, S)
    assert drawn.dtype == np.int32
    assert drawn.min() >= 0
    assert drawn.max() < 9
    counts = (drawn[..., None] == np.arange(9)).sum(0)
    logits = HIDDEN.astype(np.float64) @ head[:9].astype(np.float64).T
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert chi_square(counts, DRAWS * probabilities).max() < LARGEST_CHI_SQUARE
    # the samples of another position do not pass
    other = np.roll(probabilities, 1, axis=1)
    assert chi_square(counts, DRAWS * other).min() > LARGEST_CHI_SQUARE


@pytest.mark.parametrize("chunks", [12, 5], indirect=True, ids=lambda rows: f"chunks of {rows}")
def test_sampled_targets_of_different_positions_and_rows_are_independent(chunks):
    """With equal logits everywhere, two positions agree as often as two dice, in the same or in different chunks."""
    drawn = draw(np.zeros((B, S, D), np.float32), HEAD, V).reshape(DRAWS, B * S)
    for first in range(B * S):
        for second in range(first):
            agree = (drawn[:, first] == drawn[:, second]).mean()
            assert abs(agree - 1 / V) < 5 * (1 / V / DRAWS) ** 0.5, (first, second)


def test_the_same_key_samples_the_same_targets():
    one, other = (sample_targets(HIDDEN, HEAD, jax.random.key(2), V) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert (one != sample_targets(HIDDEN, HEAD, jax.random.key(3), V)).any()


@pytest.mark.parametrize("token", [0, _BLOCK - 1, _BLOCK, 2 * _BLOCK - 1])
def test_the_first_and_last_token_of_each_block_of_the_vocabulary_are_drawn(token):
    head = np.zeros((2 * _BLOCK, D), np.float32)
    head[token] = 5  # a logit of 25, where all others have 0
    drawn = sample_targets(np.ones((B, S, D), np.float32), head, jax.random.key(4), 2 * _BLOCK)
    assert (np.asarray(drawn) == token).all()
