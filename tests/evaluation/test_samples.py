"""Samples during training: their text, and that it does not depend on prompts next to it."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import TOKENIZER
from models import quick

from lmtrain.evaluation.config import EvaluationConfig
from lmtrain.evaluation.interface import Context
from lmtrain.evaluation.run import Evaluations, build_evaluators
from lmtrain.evaluation.samples import Samples
from lmtrain.generation.decode import SamplingSettings, build_batch_sampler, sample
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.runtime.errors import UserError
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout

SIZES = {"seq_len": 32, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6]]


@pytest.mark.parametrize(
    "config",
    [LlamaConfig, *(pytest.param(other, marks=pytest.mark.long) for other in (Gpt2Config, MptConfig, BackpackConfig))],
)
def test_prompts_of_several_lengths_continue_as_each_does_alone(config):
    model, params = quick.writing_model(config(**SIZES), 40)
    settings = SamplingSettings(8, temperature=0)
    run = build_batch_sampler(model, build_layout(PartitioningConfig()), "float32", settings)
    longest = max(map(len, PROMPTS))
    tokens = np.array([prompt + [7] * (longest - len(prompt)) for prompt in PROMPTS], np.int32)
    found = run(params, tokens, np.array(list(map(len, PROMPTS)), np.int32), np.uint32(0))
    prompts = [np.array(prompt, np.int32) for prompt in PROMPTS]
    alone = [sample(model, params, prompt, jax.random.key(0), settings, eos_id=None) for prompt in prompts]
    assert np.asarray(found).tolist() == alone
    assert len({tuple(text) for text in alone}) == 3


@pytest.fixture(scope="module")
def context():
    tokenizer = load_tokenizer(str(TOKENIZER))
    model, params = quick.writing_model(Gpt2Config(**SIZES), tokenizer.vocab_size)
    how = {"layout": build_layout(PartitioningConfig()), "compute_dtype": "bfloat16", "seq_len": 32}
    return Context(model=model, tokenizer=tokenizer, sets={}, **how), params


def test_texts_are_those_of_averaged_parameters_and_have_no_metrics(context):
    context, params = context
    other = jax.tree.map(lambda leaf: -leaf, params)
    config = EvaluationConfig(sample_prompts=["one", "a\nb"], sample_length=6)
    evaluations = Evaluations(build_evaluators(config), context)
    due = evaluations.due(1000, 2000)
    assert [one.name for one in due] == ["samples"]  # there are no validation sets
    alone, both, averaged = (
        evaluations.run(due, *trees, 1000) for trees in ((params, None), (other, params), (other, None))
    )
    assert alone.texts == both.texts != averaged.texts
    assert list(alone.texts) == ["one", "a\nb"]
    assert alone.metrics == {}
    assert json.dumps("a\nb")[1:-1] in alone.lines[0]
    assert evaluations.run(due, params, None, 2000).texts != alone.texts  # another step draws other tokens
    assert evaluations.run(due, params, None, 1000).texts == alone.texts


def test_prompts_that_cannot_be_used_are_refused_at_the_start(context):
    context, _ = context
    with pytest.raises(UserError, match=r"sample_prompts: 'one one.*trainer\.sample_length 30.*model\.seq_len 32"):
        Evaluations([Samples(["one", "one one one one"], 30, 5)], context)
    without_text = dataclasses.replace(context.tokenizer, library=None)
    with pytest.raises(UserError, match="cannot encode"):
        Evaluations([Samples(["one"], 5, 5)], dataclasses.replace(context, tokenizer=without_text))
    with pytest.raises(ValueError, match="sample_prompts needs steps_per_eval"):
        EvaluationConfig(sample_prompts=["one"], steps_per_eval=None)
