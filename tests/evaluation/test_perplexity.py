"""Validation loss: a mean over tokens, not over batches, against plain numpy."""

import math
import re

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


def with_bytes(_, batch):
    """Like `already_summed`, for batches with byte counts."""
    loss, count, size = batch
    return jax.numpy.float32(loss), jax.numpy.int32(count), jax.numpy.int32(size)


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


def test_sums_are_exact_beyond_float32_and_int32():
    """Also for all sets together, whose counts are added once more."""
    batches = [(2.0**24, 1)] + [(1.0, 1)] * 7  # in float32, adding 1 to 2^24 has no effect
    assert evaluate(already_summed, None, {"": lambda: batches})["eval/loss"] == (2**24 + 7) / 8
    sets = {name: lambda: [(2.0**31, 2**31 - 1)] * 2 for name in ("a", "b")}
    result = evaluate(already_summed, None, sets)
    assert result["eval/tokens"] == 4.0 * (2**31 - 1)
    assert result["eval/loss"] == result["eval/a/loss"] == 2**31 / (2**31 - 1)  # 1.0 in float32
    most = 2**31 - 1
    bits = evaluate(with_bytes, None, {"": lambda: [(1.0, 1, most)] * 3})["eval/bpb"]
    assert bits * (3 * most) == pytest.approx(3 / math.log(2))


def test_nan_is_reported_not_hidden():
    assert np.isnan(evaluate(already_summed, None, {"": lambda: [(1.0, 1), (np.nan, 1)]})["eval/loss"])


def test_several_sets_have_their_own_losses_and_bits_per_byte_and_two_kinds_of_mean():
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


def test_a_set_without_bytes_has_no_bits_per_byte_and_no_part_in_their_mean():
    sets = {"a": lambda: [(6.0, 2, 0)], "b": lambda: [(6.0, 2, 0)]}
    assert not [name for name in evaluate(with_bytes, None, sets) if "bpb" in name]
    assert evaluate(with_bytes, None, {}) == {"eval/loss": 0.0, "eval/tokens": 0.0}
    result = evaluate(with_bytes, None, {"a": lambda: [(6.0, 2, 4)], "empty": list})
    assert "eval/empty/bpb" not in result
    assert result["eval/macro_bpb"] == result["eval/a/bpb"] == pytest.approx(1.5 / math.log(2))


def test_the_line_has_loss_perplexity_and_the_other_metrics():
    metrics = {"eval/loss": 2.0, "eval/tokens": 9.0, "eval/books/loss": 1.5, "eval/books/bpb": 1.0}
    metrics |= {"eval/macro_loss": 2.25, "eval/ema/loss": 1.0, "eval/ema/books/loss": 0.5, "eval/ema/loss/loss": 0.75}
    line = Perplexity().describe(metrics | {"eval/loss/loss": 3.0})
    found = ["loss 2.0000", "perplexity 7.4", "average 1.0000", "books 1.5000", "loss 3.0000"]
    assert re.findall(r"\w+ [\d.]+", line) == found
    assert "inf" in Perplexity().describe({"eval/loss": 701.0})
