"""Losses of pairs of answers equal TRL's formulas on single sequences: values, gradients, metrics."""

import jax
import numpy as np
import pytest
from models import quick
from objectives.pairs_of_answers import packed, random_pairs, trl_loss

from lmtrain.lora.config import LoraConfig
from lmtrain.lora.model import adapt
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.interface import MAIN, outputs_of
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.objectives.config import DpoConfig, OrpoConfig, SimpoConfig

VOCAB = 11
MODEL = quick.TwoTokenLM(8, VOCAB)
PARAMS = quick.random_params(MODEL, 0.3)
PAIRS = random_pairs(VOCAB, [(2, 3, 1), (1, 4, 5), (3, 2, 2), (4, 1, 6), (2, 2, 3)])
WINDOWS = [PAIRS[:2], [PAIRS[2]], [PAIRS[3]], [PAIRS[4]]]
REFERENCE = np.random.default_rng(1).normal(-8, 3, 2 * len(PAIRS)).astype(np.float32)
BATCH = packed(WINDOWS, 20, REFERENCE)
OF = {
    "dpo": DpoConfig(beta=0.3),
    "smoothed": DpoConfig(beta=0.3, label_smoothing=0.2),
    "ipo": DpoConfig(beta=0.3, loss="ipo"),
    "orpo": OrpoConfig(beta=0.3),
    "simpo": SimpoConfig(beta=0.8, gamma=0.3),
}


def expected(name, apply, params, pairs=PAIRS, reference=REFERENCE):
    config = OF[name]
    kind = getattr(config, "loss", config.type)
    other = getattr(config, "gamma", getattr(config, "label_smoothing", 0.0))

    def loss(params):
        return trl_loss(kind, config.beta, other, apply, params, pairs, reference)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def check_equal(found, gradients):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), found, gradients)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", OF)
def test_a_step_equals_the_formula_on_single_sequences(name, microbatches):
    """Microbatches have different numbers of pairs: two and three."""
    (loss, accuracy), gradients = expected(name, lambda params, ids: MODEL.apply({"params": params}, ids), PARAMS)
    objective = OF[name].build(0.0)
    metrics, found = quick.metrics_and_gradients(MODEL, PARAMS, BATCH, objective=objective, microbatches=microbatches)
    assert metrics["train/loss"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["train/rewards/accuracies"] == pytest.approx(float(accuracy))
    rewards = metrics["train/rewards/chosen"], metrics["train/rewards/rejected"]
    assert metrics["train/rewards/margins"] == pytest.approx(rewards[0] - rewards[1], abs=1e-5)
    check_equal(found, gradients)


@pytest.mark.parametrize("name", OF)
def test_a_pair_with_an_answer_without_targets_does_not_count(name):
    """Such as one whose prompt alone fills its half of a sequence."""
    cut = packed([*WINDOWS, [random_pairs(VOCAB, [(9, 2, 2)], seed=5)[0]]], 20, [*REFERENCE, -3, -4])
    cut["loss_mask"][-1, 11:] = False
    objective = OF[name].build(0.0)
    metrics, gradients = quick.metrics_and_gradients(MODEL, PARAMS, BATCH, objective=objective)
    with_cut, others = quick.metrics_and_gradients(MODEL, PARAMS, cut, objective=objective)
    assert with_cut == pytest.approx(metrics, rel=1e-5)
    check_equal(others, gradients)


@pytest.mark.parametrize("name", OF)
def test_a_batch_without_pairs_has_loss_and_gradients_of_zero(name):
    batch = packed([[], []], 8)
    loss, gradients = quick.loss_and_gradients(MODEL, PARAMS, batch, objective=OF[name].build(0.0))
    assert loss == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_odds_of_certain_answers_are_finite():
    certain = jax.tree.map(lambda leaf: 100 * leaf, PARAMS)
    loss, gradients = quick.loss_and_gradients(MODEL, certain, BATCH, objective=OF["orpo"].build(0.0))
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "adapts"),
    [
        (Gpt2Config, False),
        (LlamaConfig, False),
        (MptConfig, False),
        (MptConfig, True),
        pytest.param(Gpt2Config, True, marks=pytest.mark.release),
        pytest.param(LlamaConfig, True, marks=pytest.mark.release),
    ],
)
def test_losses_and_gradients_of_families_equal_the_formulas(family, adapts):
    """Packed into sequences with document masking, against each answer alone."""
    config = family(hidden_dim=16, num_heads=2, num_layers=2, seq_len=24)
    model, params = quick.writing_model(config, VOCAB)
    lora = LoraConfig(r=2, alpha=4.0) if adapts else None
    adapted = adapt(lora, config, model)
    if adapts:
        whole = jax.eval_shape(adapted.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2), np.int32))
        params = {"base": params, "adapters": quick.random_like({"params": whole["params"]["adapters"]}, 0.3)}
    pairs, reference = [PAIRS[0], PAIRS[2]], REFERENCE[:4]
    batch = packed([pairs], 24, reference)

    def apply(params, ids):
        head = adapted.apply({"params": params}, {"tokens": ids}, True, method=outputs_of)[MAIN]
        return (head.hidden @ head.matrix.T)[..., :VOCAB]

    for name in OF:
        (loss, _), gradients = expected(name, apply, params, pairs, reference)
        objective = OF[name].build(0.0)

        def ours(params, objective=objective):
            outputs = adapted.apply({"params": params}, batch, True, method=outputs_of)
            total = objective.loss_sum(outputs, batch).total
            return total / objective.weights(batch).sum()

        found, others = jax.jit(jax.value_and_grad(ours))(params)
        assert found == pytest.approx(float(loss), rel=1e-5)
        check_equal(others, gradients)
