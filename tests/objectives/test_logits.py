"""Chunks of rows: their sizes on each platform, and what is computed in them, for any size."""

import functools

import jax
import numpy as np
import pytest

from lmtrain.models.interface import Head
from lmtrain.objectives import chunked_sums
from lmtrain.objectives.chunked_sums import Chunks, rows_at_once


@pytest.mark.parametrize("kind", ["gpu", "tpu"])
@pytest.mark.parametrize(
    ("rows", "vocab"),
    [(64 * 1024, 50304), (64 * 1021, 50304), (4 * 4093, 32000), (4093, 32000), (8 * 8192, 128256), (1000, 50304)],
)
def test_chunks_on_accelerators_have_about_a_thousand_rows_and_little_padding(kind, rows, vocab):
    """Also for prime sequence lengths."""
    size = rows_at_once(rows, vocab, kind)
    assert min(rows, 1024) <= size <= max({"gpu": 2**28, "tpu": 2**27}[kind] // vocab + 128, 1024)
    number = -(-rows // size)
    assert number * size - rows < max(0.06 * rows, 128)


@pytest.mark.parametrize(
    ("rows", "vocab", "expected"), [(100, 2**10, 100), (2**14, 2**10, 2**12), (2**10, 2**20, 64), (10, 2**22, 10)]
)
def test_chunks_on_a_cpu_fit_its_caches(rows, vocab, expected):
    assert rows_at_once(rows, vocab, "cpu") == expected


def test_rows_are_cut_and_joined_and_the_last_chunk_is_padded_with_zeros(chunks):
    array = np.arange(1.0, 37.0).reshape(2, 6, 3)
    split = Chunks.of(Head(array, np.zeros((7, 3))))
    cut = np.asarray(split.cut(array))
    assert cut.shape == (-(-12 // chunks), chunks, 3)
    assert not cut.reshape(-1, 3)[12:].any()
    np.testing.assert_array_equal(split.join(cut, array), array)


def test_functions_of_rows_get_their_logits_and_padding_of_the_vocabulary_counts_as_no_token(chunks):
    hidden, head = np.arange(24.0).reshape(2, 6, 2), np.array([[1.0, 0], [0, 1], [9, 9]])
    split = Chunks.of(Head(hidden, head, 2))

    def of_rows(logits, head, number):
        return {"log sum": split.log_sum(logits), "second": split.chosen(logits, head, number * 0 + 1)}

    found = split.map_rows(of_rows, Head(hidden, head), np.arange(12).reshape(2, 6))
    np.testing.assert_array_equal(found["second"], hidden[..., 1])
    np.testing.assert_allclose(found["log sum"], np.logaddexp(hidden[..., 0], hidden[..., 1]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_log_sum_of_each_platform_and_its_derivatives(monkeypatch, kind):
    """Also in a row of equal logits, and far from 0."""
    monkeypatch.setattr(chunked_sums, "platform", lambda: kind)
    logits, direction = np.random.default_rng(0).normal(size=(2, 4, 50)).astype(np.float32) * 5
    logits[1], logits[2] = 7, logits[2] - 1e4
    chunks = Chunks((), (), (), 4, 50, 50, None)
    reference = functools.partial(jax.nn.logsumexp, axis=-1)
    for function in (lambda x: x, jax.grad):
        ours, theirs = (function(lambda x, of=of: of(x).sum()) for of in (chunks.log_sum, reference))
        for found, right in zip(*(jax.jvp(f, (logits,), (direction,)) for f in (ours, theirs)), strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
