"""The evaluation step of a model: sums over the targets of a batch, without dropout; and steps over many batches."""

import jax
import numpy as np
import pytest
from models import quick

from lmtrain.evaluation.eval_step import build_eval_step, read_ahead
from lmtrain.hf.tokenizer import TextSizes
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM

VOCAB, LENGTH = 11, 6
MODEL = Gpt2LM(Gpt2Config(seq_len=LENGTH, hidden_dim=8, num_heads=2, num_layers=1, resid_pdrop=0.5), VOCAB)


def test_the_sums_are_those_of_the_targets_without_dropout():
    random, params = np.random.default_rng(0), quick.random_params(MODEL, 0.5)
    tokens = random.integers(0, VOCAB, (3, LENGTH), dtype=np.int32)
    batch = {"tokens": tokens, "loss_mask": np.arange(LENGTH) < np.array([[5], [2], [0]])}
    sizes = 10 ** np.arange(VOCAB) % 10_007  # each sum identifies the tokens in it
    first = 2 * sizes
    given = [TextSizes(sizes.tolist()), TextSizes(sizes.tolist(), first.tolist(), (3, 4)), None]
    with_bytes, with_prefix, without = (build_eval_step(MODEL, quick.LAYOUT, "float32", each) for each in given)
    loss, count, size = with_bytes(params, batch)
    logits = np.asarray(jax.jit(MODEL.apply)({"params": params}, tokens), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, positions = np.nonzero(batch["loss_mask"])
    targets = tokens[rows, positions + 1]
    assert float(loss) == pytest.approx(-log_probs[rows, positions, targets].sum(), rel=1e-5)
    assert (int(count), int(size)) == (7, sizes[targets].sum())
    assert int(without(params, batch)[2]) == 0
    batch["segments"] = np.array([[0, 0, 0, 3, 3, 3]] * 3, np.int32)  # the first token of a document has another size
    starts = np.isin(tokens[rows, positions], (3, 4)) | (positions == 2)
    assert starts.sum() > 1
    assert int(with_prefix(params, batch)[2]) == np.where(starts, first[targets], sizes[targets]).sum()


def test_some_batches_are_dispatched_ahead_of_the_result_that_is_read():
    """So the device is always busy, and at a signal between two batches only a few are running."""
    dispatched, between = [], []
    results = read_ahead(lambda _, name: dispatched.append(name) or name, None, "abcdefg", lambda: between.append(1))
    ahead = [len(dispatched) - number for number, name in enumerate(results) if name == "abcdefg"[number]]
    assert ahead == [5, 5, 5, 4, 3, 2, 1]
    assert len(between) == 7
