"""Validation loss: a mean over tokens, not over batches, against plain numpy."""

import math

import jax
import numpy as np
import pytest

from lmtrain.evaluation.perplexity import Perplexity, measure


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
    result = evaluate(already_summed, None, {"": lambda: iter(batches)})
    assert result == {"eval/loss": loss, "eval/tokens": tokens}
    assert {type(value) for value in result.values()} == {float}


def test_sums_are_kept_in_float64():
    # in float32, adding 1 to 2^24 has no effect
    batches = [(2.0**24, 1)] + [(1.0, 1)] * 7
    assert evaluate(already_summed, None, {"": lambda: batches})["eval/loss"] == (2**24 + 7) / 8


def test_many_counts_add_up_beyond_int32_without_a_warning():
    """Also for all sets together, whose counts are added once more."""
    sets = {name: lambda: [(2.0**31, 2**31 - 1)] * 2 for name in ("a", "b")}
    result = evaluate(already_summed, None, sets)
    assert result["eval/tokens"] == 4.0 * (2**31 - 1)
    assert result["eval/loss"] == result["eval/a/loss"] == 2**31 / (2**31 - 1)  # 1.0 in float32


def test_nan_is_reported_not_hidden():
    assert np.isnan(evaluate(already_summed, None, {"": lambda: [(1.0, 1), (np.nan, 1)]})["eval/loss"])


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
    assert Perplexity().describe(metrics) == line
