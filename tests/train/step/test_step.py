"""The training step: microbatches change nothing, dropout is a function of (seed, step), and it compiles once."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import quick

from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.objectives.cross_entropy import CrossEntropy
from lmtrain.train.step.hessian import estimate_hessian
from lmtrain.train.step.state import TrainState, state_shardings

SIZES = {
    "hidden_dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "seq_len": 8,
    "mlp_scale": 2,
    "gradient_checkpointing": False,
}
VOCAB = 24
MODEL = Gpt2LM(Gpt2Config(**SIZES), VOCAB)
DROPPING = Gpt2LM(Gpt2Config(**SIZES, resid_pdrop=0.3), VOCAB)
OPTIMIZER = optax.sgd(0.5)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCAB, (4, 8)).astype(np.int32)
# rows with 7, 5, 1 and 0 targets: any two microbatches differ
MASK = np.arange(8) < np.array([[7], [5], [1], [0]])
BATCH = {"tokens": TOKENS, "loss_mask": MASK}


VALUES = quick.random_params(MODEL, 0.3)


def fresh(step: int = 0) -> TrainState:
    return quick.new_state(VALUES, OPTIMIZER, step)


def build(model=MODEL, optimizer=OPTIMIZER, **more):
    return quick.build_step(model, optimizer, schedule=lambda step: 0.5 + step, **more)


@pytest.fixture(scope="module")
def whole():
    """The step without gradient accumulation."""
    return build()


@pytest.fixture(scope="module")
def dropping():
    """The step of a model with dropout."""
    return build(DROPPING)


def test_the_loss_is_the_mean_over_targets_and_the_update_follows_its_gradient(whole):
    def mean_loss(params):
        logits = MODEL.apply({"params": params}, TOKENS)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:])
        return (losses * MASK[:, :-1]).sum() / 13

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(VALUES)
    state, metrics, _ = whole(fresh(), BATCH)
    assert float(metrics["train/loss"]) == pytest.approx(float(loss), rel=1e-5)
    norm = np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(gradients)))
    assert float(metrics["train/gradient_norm"]) == pytest.approx(float(norm), rel=1e-4)
    for new, old, gradient in zip(*map(jax.tree.leaves, (state.params, VALUES, gradients)), strict=True):
        np.testing.assert_allclose(new, old - 0.5 * gradient, rtol=1e-4, atol=1e-5)


def test_microbatches_with_uneven_masks_give_the_same_metrics_and_gradients():
    quick.check_microbatches(MODEL, VALUES, BATCH, (2, 4))


def test_a_batch_without_targets_changes_nothing(whole):
    state, metrics, _ = whole(fresh(), {"tokens": TOKENS, "loss_mask": np.zeros_like(MASK)})
    assert float(metrics["train/loss"]) == 0
    for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(VALUES), strict=True):
        np.testing.assert_array_equal(new, old)


def test_masked_tokens_after_the_last_target_do_not_affect_the_step(whole):
    changed = TOKENS.copy()
    changed[1, 6:] = (changed[1, 6:] + 1) % VOCAB  # the last target of row 1 is token 5
    losses = [float(whole(fresh(), {"tokens": t, "loss_mask": MASK})[1]["train/loss"]) for t in (TOKENS, changed)]
    assert losses[0] == losses[1]


def test_steps_are_counted_and_the_logged_learning_rate_is_that_of_the_update(whole):
    state, rates = fresh(), []
    for _ in range(3):
        state, metrics, _ = whole(state, BATCH)
        rates.append(float(metrics["train/learning_rate"]))
    assert int(state.step) == 3
    assert rates == [0.5, 1.5, 2.5]


def test_the_step_compiles_once(caplog):
    _, shardings = state_shardings(MODEL, OPTIMIZER, quick.LAYOUT, "float32")
    step, state = build(), jax.device_put(fresh(), shardings)  # placed like a restored or initial state
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(4):
            state, _, _ = step(state, BATCH)
    compiled = [record.message for record in caplog.records if "Compiling jit(step)" in record.message]
    assert len(compiled) == 1, [record.message[:80] for record in caplog.records]


def test_dropout_is_a_function_of_seed_and_step(dropping):
    def loss(step, count):
        return float(step(fresh(count), BATCH)[1]["train/loss"])

    again = build(DROPPING)
    assert loss(dropping, 5) == loss(dropping, 5) == loss(again, 5)
    assert loss(dropping, 5) != loss(dropping, 6)
    assert loss(build(DROPPING, seed=1), 5) != loss(dropping, 5)


def test_bfloat16_computation_keeps_float32_parameters_and_is_close(whole):
    step = build(compute_dtype="bfloat16")
    state, metrics, _ = step(fresh(), BATCH)
    exact = float(whole(fresh(), BATCH)[1]["train/loss"])
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    assert metrics["train/loss"].dtype == np.float32
    assert float(metrics["train/loss"]) != exact
    assert float(metrics["train/loss"]) == pytest.approx(exact, rel=0.02)
    # it rounds matrices and embeddings, not the weights of norms
    for rounded in (is_norm, lambda path: not is_norm(path)):
        values = jax.tree_util.tree_map_with_path(
            lambda path, p, rounded=rounded: p.astype(jnp.bfloat16).astype(np.float32) if rounded(path) else p, VALUES
        )
        same = float(step(quick.new_state(values, OPTIMIZER), BATCH)[1]["train/loss"]) == float(metrics["train/loss"])
        assert same == (rounded is not is_norm)


def is_norm(path) -> bool:
    return any(entry.key.startswith("norm_") for entry in path)


def test_an_optimizer_that_uses_the_hessian_gets_an_estimate_of_this_batch():
    key, method = jax.random.key(3), "gauss_newton_bartlett"

    def update(gradients, state, params=None, *, hessian, **_):
        return hessian(key), state  # as the update of the parameters

    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    model = quick.TwoTokenLM(8, VOCAB)
    values = quick.random_params(model)
    state, _, _ = build(model, optimizer, hessian=method)(quick.new_state(values, optimizer), BATCH)
    expected = jax.jit(lambda: estimate_hessian(method, model, CrossEntropy(), values, BATCH, key, 1))()
    moved = jax.tree.map(np.subtract, state.params, values)
    for found, estimate in zip(jax.tree.leaves(moved), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, estimate, rtol=1e-4, atol=1e-6)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-3
