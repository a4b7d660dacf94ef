"""Validation sets as batches: their number, and that each iteration starts again."""

import json

import numpy as np
from opened_run import open_run

from lmtrain.evaluation.interface import open_validation_sets
from lmtrain.hf.tokenizer import token_bytes
from lmtrain.sharding.mesh import build_layout


def sets(max_batches=None, **sections):
    """The validation sets of a tiny run."""
    config, caches, _ = open_run(**sections)
    layout, how = build_layout(config.trainer), {"seq_len": 32, "batch_size": 4, "max_batches": max_batches}
    return open_validation_sets(config.data, caches.validation, layout, **how)


def test_each_iteration_reads_the_same_batches_from_the_beginning():
    (validation,) = sets().values()
    first, second = list(validation), list(validation)
    assert len(first) == len(second) == len(validation) > 2
    for one, other in zip(first, second, strict=True):
        assert one["tokens"].shape == (4, 32)
        assert (one["tokens"] == other["tokens"]).all()
    assert (first[0]["tokens"] != first[1]["tokens"]).any()


def test_the_targets_have_every_byte_of_the_text_once_but_those_of_the_first_token():
    """So bits per byte are those of the whole text, as lm-eval counts it, which predicts the first token, too."""
    _, caches, tokenizer = open_run()
    (cache,), (validation,) = caches.validation.values(), sets().values()
    lengths = np.array(token_bytes(tokenizer))
    tokens, masks = zip(*((batch["tokens"], np.array(batch["loss_mask"])) for batch in validation), strict=True)
    targets = np.concatenate([np.roll(part, -1, axis=1)[mask] for part, mask in zip(tokens, masks, strict=True)])
    with open(cache.sources[0]["url"]) as file:
        size = sum(len(json.loads(line)["text"].encode()) for line in file)
    assert lengths[targets].sum() == size - lengths[int(tokens[0][0, 0])]


def test_a_limit_of_batches_takes_the_first_ones_and_is_logged(caplog):
    with caplog.at_level("INFO"):
        (limited,) = sets(max_batches=2).values()
    assert len(limited) == len(list(limited)) == 2
    assert "evaluation uses 2 of " in caplog.text
    assert "trainer.max_eval_batches" in caplog.text
    assert sets(data={"validation_urls": None}) == {}
