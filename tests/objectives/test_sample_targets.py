"""Targets sampled from the prediction: their distribution, in chunks of any size."""

import jax
import numpy as np
import pytest
from objectives.test_row_losses import HEAD, HIDDEN, B, D, S, V

from lmtrain.models.interface import Head
from lmtrain.objectives.cross_entropy import _BLOCK, sample_targets

DRAWS = 4000


# 99.99% of chi-square values of 8 degrees of freedom are below 31.8; there are 12 positions, and the key is fixed
LARGEST_CHI_SQUARE = 31.8


def draw(hidden, head, vocab_size: int, number: int = DRAWS):
    """[number, B, S]"""
    keys = jax.random.split(jax.random.key(11), number)
    return np.asarray(jax.jit(jax.vmap(lambda key: sample_targets(Head(hidden, head, vocab_size), key)))(keys))


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
    one, other = (sample_targets(Head(HIDDEN, HEAD, V), jax.random.key(2)) for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert (one != sample_targets(Head(HIDDEN, HEAD, V), jax.random.key(3))).any()


@pytest.mark.parametrize("token", [0, _BLOCK - 1, _BLOCK, 2 * _BLOCK - 1])
def test_the_first_and_last_token_of_each_block_of_the_vocabulary_are_drawn(token):
    head = np.zeros((2 * _BLOCK, D), np.float32)
    head[token] = 5  # a logit of 25, where all others have 0
    drawn = sample_targets(Head(np.ones((B, S, D), np.float32), head, 2 * _BLOCK), jax.random.key(4))
    assert (np.asarray(drawn) == token).all()
