"""Scores of a batch are those of each question alone, on any mesh."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from forked import fake_devices, run_script

from lmtrain.evaluation.scorer import Question, Scorer, lengths
from lmtrain.runtime.signals import StoppedError


def test_lengths_are_few_and_at_least_half_used():
    assert lengths(2048, 128) == [128, 256, 384, 512, 768, 1024, 1536, 2048]
    assert lengths(1000, 128) == [128, 256, 384, 512, 768, 1000]
    assert lengths(24, 32) == [24]
    assert lengths(40, 32) == [32, 40]


def test_answers_do_not_depend_on_the_questions_next_to_them(gpt2):
    context, params = gpt2
    random = np.random.default_rng(0)
    questions = []
    for length, targets in ((1, 1), (5, 3), (5, 5), (40, 2), (128, 128), (128, 1), (100, 40), (31, 31), (33, 32)):
        tokens = tuple(random.integers(0, 300, length).tolist())
        questions += [Question(tokens, tuple(random.integers(0, 300, targets).tolist())) for _ in range(3)]
    each = list(dict.fromkeys(tokens for tokens, _ in questions))
    padded = np.array([tokens + (0,) * (128 - len(tokens)) for tokens in each])  # the model is causal
    found = jax.jit(lambda params: jax.nn.log_softmax(context.model.apply({"params": params}, padded)))(params)
    logits = {tokens: row[: len(tokens)] for tokens, row in zip(each, np.asarray(found), strict=True)}
    greedy = [Question(tokens, tuple(logits[tokens].argmax(-1)[-2:].tolist())) for tokens, _ in questions[3:6]]
    questions += greedy
    counted = []
    answers = Scorer(context).score(params, questions, counted.append)
    assert sum(counted) == len(questions)
    for (tokens, targets), answer in zip(questions, answers, strict=True):
        rows = logits[tokens][-len(targets) :]
        assert answer.log_likelihood == pytest.approx(rows[np.arange(len(targets)), targets].sum(), abs=1e-4)
        assert answer.is_greedy == (rows.argmax(-1).tolist() == list(targets))
    assert [answer.is_greedy for answer in answers[-3:]] == [True] * 3


def test_a_stop_request_ends_the_scoring_between_batches(gpt2):
    context, params = gpt2

    def stop():
        raise StoppedError

    with pytest.raises(StoppedError):
        Scorer(dataclasses.replace(context, check_stop=stop)).score(params, [Question((1,), (2,))])


SCRIPT = """
from models import quick
import jax, json, sys, numpy as np
from lmtrain.evaluation.scorer import Question, Scorer
from lmtrain.evaluation.interface import Context
from lmtrain.generation.decode import GreedyDecoder
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.sharding.placement import parameter_shardings
from lmtrain.models.params import abstract_params

random = np.random.default_rng(0)
draw = lambda count: tuple(random.integers(0, 90, count).tolist())
questions = [Question(draw(n), draw(min(n, 3))) for n in range(1, 60)] + [Question(draw(64), draw(64))]
prompts = [list(draw(n)) for n in range(3, 11)]
found = {}
for family, tested in json.loads(sys.argv[1]).items():
    sizes = {"hidden_dim": 16, "num_heads": 4, "num_layers": 2, "seq_len": 64}
    config = RunConfig.model_validate({"model": {"type": family, **sizes}}).model
    model, params = quick.writing_model(config, 90)
    for name, settings in {
        "one": None, "fsdp": {}, "tensor": {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads", "vocab"]}
    }.items():
        if name not in ("one", *tested):
            continue
        devices = jax.devices()[:1] if settings is None else None
        layout = build_layout(PartitioningConfig(**(settings or {})), devices)
        placed = jax.device_put(params, parameter_shardings(layout, abstract_params(model)))
        context = Context(
            model=model, layout=layout, compute_dtype="float32", tokenizer=None, sets={}, seq_len=64, batch_size=8
        )
        answers = Scorer(context).score(placed, questions)
        texts = GreedyDecoder(model, layout, "float32")(placed, prompts, 20, 64, lambda row, new: False)
        found[f"{family} {name}"] = [[a.log_likelihood for a in answers], [a.is_greedy for a in answers], texts]
print(json.dumps(found))
"""


MESHES = {"gpt2": ["tensor"], "llama": ["fsdp", "tensor"], "mpt": ["fsdp"], "backpack": ["tensor"]}


@pytest.mark.long
@pytest.mark.multi_device
def test_on_meshes_scores_and_texts_are_those_of_one_device(tmp_path):
    printed = run_script(SCRIPT, json.dumps(MESHES), folder=tmp_path, XLA_FLAGS=fake_devices(8))
    found = json.loads(printed.splitlines()[-1])
    assert len({str(text) for _, _, texts in found.values() for text in texts}) > 8
    for family, meshes in MESHES.items():
        expected = found[f"{family} one"]
        for mesh in meshes:
            likelihoods, *others = found[f"{family} {mesh}"]
            np.testing.assert_allclose(likelihoods, expected[0], rtol=1e-5, atol=1e-4)
            assert others == expected[1:]
