"""Distillation equals PyTorch's divergence and cross-entropy in float64: losses and gradients, in any chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from models import quick

from lmtrain.models.interface import MAIN, Head, LogitCap
from lmtrain.objectives.config import DistillConfig
from lmtrain.objectives.distillation import TAUGHT
from lmtrain.train.step.state import TEACHER, TrainState

VOCAB, PADDED, ROWS, LENGTH = 11, 12, 3, 4
RNG = np.random.default_rng(0)


def random(*shape, scale=1.0):
    return (RNG.normal(size=shape) * scale).astype(np.float32)


HIDDEN, HEAD = random(ROWS, LENGTH, 6), random(PADDED, 6)
THEIRS, THEIR_HEAD = random(ROWS, LENGTH, 5), random(PADDED, 5)
TOKENS = RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
MASK = np.array([[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0]], bool)
BATCH = {"tokens": TOKENS, "loss_mask": MASK}


def logits(hidden, head, cap):
    products = (hidden @ head.T)[..., :VOCAB]
    return products if cap is None else cap * torch.tanh(products / cap)


def by_torch(temperature, alpha, cap, their_cap):
    """Loss and gradients of hidden states and head, in float64."""
    hidden, head = (torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (HIDDEN, HEAD))
    ours = logits(hidden, head, cap)
    theirs = logits(*(torch.tensor(array, dtype=torch.float64) for array in (THEIRS, THEIR_HEAD)), their_cap)
    mask = torch.from_numpy(MASK)
    q, p = torch.log_softmax(ours / temperature, -1), torch.log_softmax(theirs / temperature, -1)
    divergence = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)[mask].sum()
    targets = torch.from_numpy(np.roll(TOKENS, -1, axis=1)).long()
    entropy = torch.nn.functional.cross_entropy(ours[mask], targets[mask], reduction="sum")
    loss = alpha * temperature**2 * divergence + (1 - alpha) * entropy
    loss.backward()
    return loss.item(), hidden.grad.numpy(), head.grad.numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize(("cap", "their_cap"), [(None, None), (2.0, 3.0)])
def test_loss_and_gradients_equal_those_of_torch(chunks, temperature, alpha, cap, their_cap):
    config = DistillConfig(teacher="teacher", temperature=temperature, alpha=alpha)
    objective = config.build(0.0)

    def loss(hidden, head):
        batch = BATCH | {TAUGHT: Head(THEIRS, THEIR_HEAD, VOCAB, their_cap and LogitCap(their_cap))}
        return objective.loss_sum({MAIN: Head(hidden, head, VOCAB, cap and LogitCap(cap))}, batch).total

    expected, *gradients = by_torch(temperature, alpha, cap, their_cap)
    assert float(loss(HIDDEN, HEAD)) == pytest.approx(expected, rel=1e-5)
    found, others = jax.value_and_grad(loss, (0, 1))(HIDDEN, HEAD)
    assert float(found) == pytest.approx(expected, rel=1e-5)
    for ours, theirs in zip(others, gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


def test_a_student_that_is_its_teacher_has_no_loss_and_no_gradient():
    objective = DistillConfig(teacher="teacher", temperature=2.0).build(0.0)
    batch = BATCH | {TAUGHT: Head(HIDDEN, HEAD, VOCAB)}
    loss, gradients = jax.value_and_grad(lambda h: objective.loss_sum({MAIN: Head(h, HEAD, VOCAB)}, batch).total)(
        HIDDEN
    )
    assert abs(float(loss)) < 1e-5
    assert np.abs(gradients).max() < 1e-5


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_runs_the_teacher_without_training_it(microbatches):
    """Of another width than the student."""
    student, teacher = quick.TwoTokenLM(8, VOCAB), quick.TwoTokenLM(6, VOCAB)
    params, taught = quick.random_params(student), quick.random_params(teacher, seed=5)
    objective = DistillConfig(teacher="teacher", temperature=2.0, alpha=0.5).build(0.0)
    step = quick.build_step(student, microbatches=microbatches, objective=objective, teacher=teacher)
    state = quick.new_state(params).replace(frozen={TEACHER: jax.tree.map(jnp.array, taught)})
    after, metrics, _ = step(state, BATCH)
    jax.tree.map(np.testing.assert_array_equal, after.frozen[TEACHER], taught)

    def by_formula(params):
        ours, theirs = (
            jax.nn.log_softmax(model.apply({"params": values}, TOKENS) / 2.0)
            for model, values in ((student, params), (teacher, taught))
        )
        divergence = (jnp.exp(theirs) * (theirs - ours)).sum(-1)
        log_q = jax.nn.log_softmax(student.apply({"params": params}, TOKENS))
        entropy = -jnp.take_along_axis(log_q, np.roll(TOKENS, -1, 1)[..., None], axis=-1)[..., 0]
        return ((2.0 * divergence + 0.5 * entropy) * MASK).sum() / MASK.sum()

    expected, gradients = jax.value_and_grad(by_formula)(params)
    assert float(metrics["train/loss"]) == pytest.approx(float(expected), rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()),
        after.opt_state[0].trace,
        gradients,
    )
    assert isinstance(after, TrainState)
