"""Validation loss: a mean over tokens, not over batches, against plain numpy."""

import math

import jax
import numpy as np
import pytest
from flax.core.meta import unbox

from lmtrain.evaluation.eval_step import build_eval_step
from lmtrain.evaluation.perplexity import Means, describe_perplexity, measure
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import plan_layout

VOCAB, LENGTH = 11, 6


def evaluate(step, params, sets) -> dict[str, float]:
    """Metrics with the names that they have in a run."""
    found = measure(step, params, {name: batches() for name, batches in sets.items()})
    return {f"eval/{name}": value for name, value in found.items()}


def already_summed(_, batch):
    """A step whose batch is its own result, as device arrays."""
    loss, count = batch
    return jax.numpy.float32(loss), jax.numpy.int32(count), jax.numpy.int32(0)


@pytest.mark.parametrize(
    ("batches", "loss", "tokens"),
    [
        ([(6.0, 2)], 3.0, 2.0),
        ([(6.0, 2), (4.0, 8)], 1.0, 10.0),  # weighted by tokens; the mean of the two means is 1.75
        ([(6.0, 3), (0.0, 0)], 2.0, 3.0),
        ([(0.0, 0)], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_the_mean_is_over_tokens(batches, loss, tokens):
    assert evaluate(already_summed, None, {"": lambda: iter(batches)}) == {"eval/loss": loss, "eval/tokens": tokens}


def test_sums_are_kept_in_float64():
    # in float32, adding 1 to 2^24 has no effect
    batches = [(2.0**24, 1)] + [(1.0, 1)] * 7
    assert evaluate(already_summed, None, {"": lambda: batches})["eval/loss"] == (2**24 + 7) / 8


def test_token_counts_beyond_int32_are_exact():
    assert evaluate(already_summed, None, {"": lambda: [(1.0, 2**31 - 1)] * 3})["eval/tokens"] == 3.0 * (2**31 - 1)


def test_many_counts_add_up_beyond_int32_without_a_warning():
    """Also for all sets together, whose counts are added once more."""
    sets = {name: lambda: [(2.0**31, 2**31 - 1)] * 2 for name in ("a", "b")}
    result = evaluate(already_summed, None, sets)
    assert result["eval/tokens"] == 4.0 * (2**31 - 1)
    assert result["eval/loss"] == result["eval/a/loss"] == 2**31 / (2**31 - 1)  # 1.0 in float32


def test_totals_are_float64_and_counts_are_integers_on_the_host():
    means = Means.of(0.1, 3, 5)
    for merged in (means, means.merge(Means.of(0.2, 2**40, 2**41))):
        for average in (merged.per_token, merged.per_byte):
            assert (type(average.total), type(average.count)) == (np.float64, np.int64)
    assert (merged.per_token.total, merged.per_token.count, merged.per_byte.count) == (0.1 + 0.2, 2**40 + 3, 2**41 + 5)


def test_results_are_plain_floats():
    result = evaluate(already_summed, None, {"": lambda: [(6.0, 2)]})
    assert {type(value) for value in result.values()} == {float}


def test_nan_is_reported_not_hidden():
    assert np.isnan(evaluate(already_summed, None, {"": lambda: [(1.0, 1), (np.nan, 1)]})["eval/loss"])


def test_some_batches_are_dispatched_ahead_of_the_result_that_is_read():
    """So the device is always busy, and at a signal between two batches only a few are running."""
    events = []

    class Result:
        def __init__(self, name):
            events.append(f"dispatch {name}")
            self.name = name

        def __float__(self):
            events.append(f"read {self.name}")
            return 1.0

    evaluate(lambda _, name: (Result(name), 1, 0), None, {"": lambda: "abcdefg"})
    ahead = [f"dispatch {name}" for name in "abcde"]
    assert events == [*ahead, "read a", "dispatch f", "read b", "dispatch g", *(f"read {name}" for name in "cdefg")]


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


def test_several_sets_have_their_own_losses_and_two_kinds_of_mean():
    sets = {"web": lambda: [(6.0, 2), (2.0, 2)], "wiki": lambda: [(6.0, 6)]}
    assert evaluate(already_summed, None, sets) == {
        "eval/loss": 1.4,
        "eval/tokens": 10.0,
        "eval/web/loss": 2.0,
        "eval/wiki/loss": 1.0,
        "eval/macro_loss": 1.5,
    }
    assert evaluate(already_summed, None, {}) == {"eval/loss": 0.0, "eval/tokens": 0.0}


def with_bytes(_, batch):
    """Like `already_summed`, for batches with byte counts."""
    loss, count, size = batch
    return jax.numpy.float32(loss), jax.numpy.int32(count), jax.numpy.int32(size)


def test_bits_per_byte_are_the_summed_loss_in_bits_over_all_bytes():
    """Over all batches together, not the mean of each batch's value."""
    batches = [(6.0, 2, 3), (2.0, 2, 13)]
    assert evaluate(with_bytes, None, {"": lambda: batches}) == pytest.approx(
        {"eval/loss": 2.0, "eval/tokens": 4.0, "eval/bpb": 8 / math.log(2) / 16}
    )


def test_one_bit_per_byte_is_one():
    assert evaluate(with_bytes, None, {"": lambda: [(5 * math.log(2), 3, 5)]})["eval/bpb"] == pytest.approx(1.0)


def test_several_sets_have_their_own_bits_per_byte_and_two_kinds_of_mean():
    sets = {"web": lambda: [(6.0, 2, 4), (2.0, 2, 4)], "wiki": lambda: [(6.0, 6, 24)]}
    assert evaluate(with_bytes, None, sets) == pytest.approx(
        {
            "eval/loss": 1.4,
            "eval/tokens": 10.0,
            "eval/bpb": 14 / math.log(2) / 32,
            "eval/web/loss": 2.0,
            "eval/web/bpb": 1 / math.log(2),
            "eval/wiki/loss": 1.0,
            "eval/wiki/bpb": 0.25 / math.log(2),
            "eval/macro_loss": 1.5,
            "eval/macro_bpb": 0.625 / math.log(2),
        }
    )


def test_without_bytes_there_are_no_bits_per_byte():
    sets = {"a": lambda: [(6.0, 2, 0)], "b": lambda: [(6.0, 2, 0)]}
    assert not [name for name in evaluate(with_bytes, None, sets) if "bpb" in name]
    assert "eval/bpb" not in evaluate(with_bytes, None, {"": list})


def test_a_set_without_bytes_is_excluded_from_the_mean_of_bits_per_byte():
    sets = {"a": lambda: [(6.0, 2, 4)], "empty": list}
    result = evaluate(with_bytes, None, sets)
    assert "eval/empty/bpb" not in result
    assert result["eval/macro_bpb"] == result["eval/a/bpb"] == pytest.approx(1.5 / math.log(2))


def test_byte_counts_beyond_int32_are_exact():
    batches = [(1.0, 1, 2**31 - 1)] * 3
    assert evaluate(with_bytes, None, {"": lambda: batches})["eval/bpb"] * (3 * (2**31 - 1)) == pytest.approx(
        3 / math.log(2)
    )


def test_bytes_are_those_of_the_targets():
    """With the evaluation step of a model: first tokens of rows and masked tokens do not count."""
    model = Gpt2LM(Gpt2Config(seq_len=LENGTH, hidden_dim=8, num_heads=2, num_layers=1), VOCAB)
    tokens = np.arange(2 * LENGTH, dtype=np.int32).reshape(2, LENGTH) % VOCAB
    sizes = 10 ** np.arange(VOCAB) % 10_007  # each sum identifies the tokens in it
    shapes = unbox(jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"])
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
    step = build_eval_step(model, plan_layout(PartitioningConfig()), "float32", sizes.tolist())
    batch = {"tokens": tokens, "loss_mask": np.arange(LENGTH) < np.array([[5], [2]])}
    result = evaluate(step, params, {"": lambda: [batch, batch]})
    counted = sizes[tokens[0, 1:6]].sum() + sizes[tokens[1, 1:3]].sum()
    # all logits are 0, so each target has the loss log(VOCAB)
    assert result["eval/bpb"] == pytest.approx(7 * math.log2(VOCAB) / counted)


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        ({"eval/loss": 2.0}, "eval loss 2.0000 (perplexity 7.4)"),
        ({"eval/loss": 2.0, "eval/bpb": 0.98765}, "eval loss 2.0000 (perplexity 7.4, 0.988 bits per byte)"),
        ({"eval/loss": 2.0, "eval/ema/loss": 1.5}, "eval loss 2.0000 (perplexity 7.4, average 1.5000)"),
        (
            {"eval/loss": 0.0, "eval/bpb": 1.0, "eval/ema/loss": 1.23456, "eval/ema/bpb": 3.0, "eval/tokens": 5.0},
            "eval loss 0.0000 (perplexity 1.0, 1.000 bits per byte, average 1.2346)",
        ),
        (
            {"eval/loss": 2.0, "eval/tokens": 9.0, "eval/books/loss": 1.5, "eval/books/bpb": 1.0, "eval/loss/loss": 3.0}
            | {"eval/macro_loss": 2.25, "eval/ema/loss": 1.0, "eval/ema/books/loss": 0.5, "eval/ema/loss/loss": 0.75},
            "eval loss 2.0000 (perplexity 7.4, average 1.0000); books 1.5000, loss 3.0000",
        ),
        ({"eval/loss": 701.0}, "eval loss 701.0000 (perplexity inf)"),
        ({"eval/loss": math.inf}, "eval loss inf (perplexity inf)"),
    ],
)
def test_the_line_has_loss_perplexity_and_the_other_metrics(metrics, line):
    assert describe_perplexity(metrics) == line
