"""Objectives in complete steps: means over the batch for any number of microbatches, and their gradients."""

import jax
import numpy as np
import optax
import pytest
from models import quick

from lmtrain.objectives.config import CrossEntropyConfig, WeightedCrossEntropyConfig
from lmtrain.train.step.hessian import estimate_hessian

VOCAB = 11
MODEL = quick.TwoTokenLM(8, VOCAB)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCAB, (4, 6)).astype(np.int32)
MASK = np.arange(6) < np.array([[5], [3], [0], [4]])
WEIGHTS = RNG.uniform(0, 0.2, (4, 6)).astype(np.float32)
BATCH = {"tokens": TOKENS, "loss_mask": MASK, "loss_weights": WEIGHTS}
PARAMS = quick.random_params(MODEL, 0.3)
OF = {
    "plain": CrossEntropyConfig(),
    "smoothed": CrossEntropyConfig(label_smoothing=0.3),
    "weighted": WeightedCrossEntropyConfig(source_weights={"a": 2.0}, label_smoothing=0.1),
}


def stepped(name: str, batch=BATCH, microbatches: int = 1):
    objective = OF[name].build(0.01)
    return quick.loss_and_gradients(MODEL, PARAMS, batch, objective=objective, microbatches=microbatches)


def by_formula(params, name: str):
    """The mean from unchunked logits, by the formula of the config."""
    config = OF[name]
    logits = MODEL.apply({"params": params}, TOKENS)[..., :VOCAB]
    log_p = jax.nn.log_softmax(logits)
    wanted = (1 - config.label_smoothing) * jax.nn.one_hot(np.roll(TOKENS, -1, 1), VOCAB)
    wanted += config.label_smoothing / VOCAB
    losses = -(wanted * log_p).sum(-1) + 0.01 * jax.nn.logsumexp(logits, -1) ** 2
    weights = MASK * (WEIGHTS if name == "weighted" else 1.0)
    return (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", OF)
def test_loss_and_gradients_of_a_step_equal_the_formula(name, microbatches):
    """Also if all weights of a batch sum to less than 1."""
    expected, gradients = jax.jit(jax.value_and_grad(by_formula), static_argnums=1)(PARAMS, name)
    loss, found = stepped(name, microbatches=microbatches)
    assert loss == pytest.approx(float(expected), rel=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * largest), found, gradients)


@pytest.mark.parametrize("name", ["plain", "weighted"])
def test_a_batch_with_all_weights_zero_has_loss_and_gradients_of_zero(name):
    loss, gradients = stepped(name, BATCH | {"loss_mask": np.zeros_like(MASK)})
    assert loss == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.long
def test_the_hessian_is_that_of_the_objective():
    """Hutchinson's estimate with the same draws: weights of one half equal half of the rows, repeated twice."""
    key = jax.random.key(3)

    def estimate(name, weights, method="hutchinson"):
        batch = BATCH | {"loss_weights": weights}
        return estimate_hessian(method, MODEL, OF[name].build(0.0), PARAMS, batch, key, 1)

    for method in ("hutchinson", "gauss_newton_bartlett"):
        one, scaled = (estimate("weighted", np.full_like(WEIGHTS, scale), method) for scale in (1.0, 0.25))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one, scaled)
    direction = optax.tree.random_like(jax.random.split(key)[0], PARAMS, jax.random.normal)
    exact = jax.jvp(jax.grad(lambda p: by_formula(p, "weighted")), (PARAMS,), (direction,))[1]
    found = estimate_hessian("hutchinson", MODEL, OF["weighted"].build(0.01), PARAMS, BATCH, key, 1)
    jax.tree.map(lambda a, u, hu: np.testing.assert_allclose(a, u * hu, rtol=1e-3, atol=1e-4), found, direction, exact)
