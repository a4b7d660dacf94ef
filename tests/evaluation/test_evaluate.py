"""Validation loss: a mean over tokens, not over batches, against plain numpy."""

import jax
import numpy as np
import pytest
from flax.core.meta import unbox

from lmtrain.evaluation.evaluate import evaluate
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout
from lmtrain.train.step import build_eval_step

VOCAB, LENGTH = 11, 6


def already_summed(_, batch):
    """A step whose batch is its own result, as device arrays."""
    loss, count = batch
    return jax.numpy.float32(loss), jax.numpy.int32(count), jax.numpy.int32(0)


@pytest.mark.parametrize(
    ("batches", "loss", "tokens"),
    [
        ([(6.0, 2)], 3.0, 2.0),
        ([(6.0, 2), (4.0, 8)], 1.0, 10.0),  # by tokens; the mean of the two means is 1.75
        ([(6.0, 3), (0.0, 0)], 2.0, 3.0),
        ([(0.0, 0)], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_the_mean_is_over_tokens(batches, loss, tokens):
    assert evaluate(already_summed, None, {"": lambda: iter(batches)}) == {"eval/loss": loss, "eval/tokens": tokens}


def test_sums_are_kept_in_float64():
    # in float32 the ones vanish beside 2^24
    batches = [(2.0**24, 1)] + [(1.0, 1)] * 7
    assert evaluate(already_summed, None, {"": lambda: batches})["eval/loss"] == (2**24 + 7) / 8


def test_token_counts_beyond_int32_are_exact():
    assert evaluate(already_summed, None, {"": lambda: [(1.0, 2**31 - 1)] * 3})["eval/tokens"] == 3.0 * (2**31 - 1)


def test_results_are_plain_floats():
    result = evaluate(already_summed, None, {"": lambda: [(6.0, 2)]})
    assert {type(value) for value in result.values()} == {float}


def test_nan_is_reported_not_hidden():
    assert np.isnan(evaluate(already_summed, None, {"": lambda: [(1.0, 1), (np.nan, 1)]})["eval/loss"])


def test_all_batches_are_dispatched_before_any_result_is_awaited():
    events = []

    class Result:
        def __init__(self, name):
            events.append(f"dispatch {name}")
            self.name = name

        def __float__(self):
            events.append(f"await {self.name}")
            return 1.0

    evaluate(lambda _, name: (Result(name), 1, 0), None, {"": lambda: ["a", "b", "c"]})
    assert events == ["dispatch a", "dispatch b", "dispatch c", "await a", "await b", "await c"]


def test_with_a_model_it_is_the_mean_negative_log_probability_without_dropout():
    config = Gpt2Config(seq_len=LENGTH, hidden_dim=8, num_heads=2, num_layers=2, resid_pdrop=0.5, attn_pdrop=0.5)
    model = Gpt2LM(config, VOCAB)
    random = np.random.default_rng(0)
    shapes = unbox(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"])
    params = jax.tree.map(lambda leaf: random.normal(0, 0.5, leaf.shape).astype(np.float32), shapes)
    batches = []
    for kept in (5, 2):  # the second batch has fewer targets
        tokens = random.integers(0, VOCAB, (3, LENGTH), dtype=np.int32)
        batches.append({"tokens": tokens, "loss_mask": np.tile(np.arange(LENGTH) < kept, (3, 1))})

    losses = []
    for batch in batches:
        logits = np.asarray(model.apply({"params": params}, batch["tokens"]), np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for row, position in zip(*np.nonzero(batch["loss_mask"]), strict=True):
            losses.append(-log_probs[row, position, batch["tokens"][row, position + 1]])

    result = evaluate(
        build_eval_step(model, plan_layout(PartitioningConfig(fsdp_axis=None)), "float32"),
        params,
        {"": lambda: batches},
    )
    assert result["eval/tokens"] == len(losses) == 21
    assert result["eval/loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_several_sets_have_losses_of_their_own_and_two_kinds_of_mean():
    sets = {"web": lambda: [(6.0, 2), (2.0, 2)], "wiki": lambda: [(6.0, 6)]}
    assert evaluate(already_summed, None, sets) == {
        "eval/loss": 1.4,
        "eval/tokens": 10.0,
        "eval/web/loss": 2.0,
        "eval/wiki/loss": 1.0,
        "eval/macro_loss": 1.5,
    }
    assert evaluate(already_summed, None, {}) == {"eval/loss": 0.0, "eval/tokens": 0.0}
