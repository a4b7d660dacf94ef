"""A model with a second output, whose loss is added to the training loss. `test_families.py` has it on meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from models.families import BATCH, VOCAB
from models.two_outputs import COEFFICIENT, SECOND, two_output_config, two_output_objective

from lmtrain.evaluation.eval_step import build_eval_step
from lmtrain.models.interface import MAIN, outputs_of
from lmtrain.models.registry import build_model
from lmtrain.objectives.config import OrpoConfig, WeightedCrossEntropyConfig
from lmtrain.objectives.cross_entropy import build_objective
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program

MODEL = build_model(two_output_config(), VOCAB)
PARAMS = quick.random_params(MODEL)
WEIGHTED = BATCH | {"loss_weights": np.where(np.arange(12) % 3, 0.5, 2.0) * np.ones((16, 1), np.float32)}


def weights_of(batch, shift):
    """The weight of each position whose target is `shift` positions ahead in its document, one by one."""
    found = np.zeros((16, 12))
    for row in range(16):
        for at in range(12 - shift):
            last = at + shift - 1
            same = batch["segments"][row, at] == batch["segments"][row, last]
            if batch["loss_mask"][row, last] and same:
                found[row, at] = batch.get("loss_weights", np.ones((16, 12)))[row, at]
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_and_gradients_are_those_of_both_losses_for_any_number_of_microbatches(weighted):
    batch, objective = BATCH, two_output_objective()
    if weighted:
        config = WeightedCrossEntropyConfig(source_weights={"web": 2.0})
        batch, objective = WEIGHTED, build_objective(config, 0.0, two_output_config().further_losses)
    weights = {MAIN: weights_of(batch, 1), SECOND: weights_of(batch, 2)}

    def total(params):
        outputs = MODEL.apply({"params": params}, batch, True, method=outputs_of)
        means = {}
        for name, shift in ((MAIN, 1), (SECOND, 2)):
            log_probs = jax.nn.log_softmax((outputs[name].hidden @ outputs[name].matrix.T)[..., :VOCAB])
            targets = np.roll(batch["tokens"], -shift, axis=1)[..., None]
            chosen = jnp.take_along_axis(log_probs, targets, axis=-1)[..., 0]
            means[name] = -(chosen * weights[name]).sum() / weights[name].sum()
        return means[MAIN] + COEFFICIENT * means[SECOND], (means[MAIN], means[SECOND])

    expected, means = jax.jit(jax.grad(total, has_aux=True))(PARAMS)
    for microbatches in (1, 4):
        metrics, gradients = quick.metrics_and_gradients(
            MODEL, PARAMS, batch, objective=objective, microbatches=microbatches
        )
        assert [metrics["train/loss"], metrics["train/second_loss"]] == pytest.approx(list(map(float, means)), rel=1e-5)
        for own, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_evaluation_computes_the_main_output_only():
    text = build_eval_step(MODEL, quick.LAYOUT, "float32").lower(PARAMS, BATCH).compile().as_text()
    assert "of_hidden" not in text
    assert "blocks" in text


def test_a_run_trains_both_and_preferences_are_refused():
    config = RunConfig(trainer={"train_batch_size": 8, "num_train_steps": 4})
    program = build_program(config.model_copy(update={"model": two_output_config()}), VOCAB)
    state, found = program.init(), []
    batch = {name: values[:8] for name, values in BATCH.items()}
    for _ in range(4):
        state, metrics, _ = program.train_step(state, batch)
        found.append(float(metrics["train/second_loss"]))
    assert found[-1] < found[0]
    with pytest.raises(UserError, match="second_loss"):
        build_objective(OrpoConfig(), 0.0, two_output_config().further_losses)
