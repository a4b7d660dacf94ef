"""Scores of given tokens against the softmax in numpy, in chunks of any size."""

import jax
import numpy as np
from objectives.test_row_losses import HEAD, HIDDEN, TARGETS

from lmtrain.models.interface import Head
from lmtrain.objectives.row_losses import score_targets


def test_scores_are_log_probabilities_and_the_first_of_equal_tokens_is_the_most_likely(chunks):
    head = np.concatenate([HEAD, HEAD[:1], 100 * np.ones_like(HEAD[:2])])  # token 12 equals 0; two rows of padding
    logits = HIDDEN.astype(np.float64) @ head[:13].astype(np.float64).T
    targets = TARGETS.copy()
    targets[0], targets[1, :2] = logits[0].argmax(-1), 12
    found = jax.jit(lambda *arrays: score_targets(Head(*arrays[:2], 13), arrays[2]))(HIDDEN, head, targets)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(expected, targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.log_prob, chosen, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.is_best, targets == logits.argmax(-1))
    assert found.is_best[0].all()
    assert not found.is_best.all()
