"""Decoding: prompts, steps with a cache against the full forward pass, and the texts of a batch against each alone.

Greedy decoding on meshes: `tests/evaluation/benchmarks`.
"""

import functools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TOKENIZER
from flax.core.meta import unbox
from models import quick
from tokenizers.processors import TemplateProcessing

from lmtrain.commands.generate import starts_with_bos
from lmtrain.generation.decode import (
    GreedyDecoder,
    SamplingSettings,
    build_batch_sampler,
    choose,
    decode,
    pad_prompts,
    sample,
    step,
)
from lmtrain.hf.tokenizer import encode_prompt, load_tokenizer
from lmtrain.models.backpack.config import BackpackConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.mpt.config import MptConfig
from lmtrain.run.config import RunConfig
from lmtrain.sharding.config import PartitioningConfig
from lmtrain.sharding.mesh import build_layout
from lmtrain.weights.export_folder import ModelOrigin
from lmtrain.weights.trained_model import TrainedModel

VOCAB, CONTEXT = 13, 12
MODEL = Gpt2LM(Gpt2Config(seq_len=CONTEXT, hidden_dim=8, num_heads=2, num_layers=2), VOCAB)
PROMPT = jnp.array([3, 1, 4], jnp.int32)
GREEDY = SamplingSettings(9, temperature=0)


@pytest.fixture(scope="module")
def params():
    """Large random parameters, so that each position has a clear most likely token, and these vary."""
    random = np.random.default_rng(5)
    shapes = unbox(jax.eval_shape(MODEL.init, jax.random.key(0), PROMPT[None])["params"])
    drawn = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), shapes)
    drawn["norm_final"]["bias"] *= 0  # it would favour the same token everywhere
    drawn["positions"]["embedding"] *= 4
    return drawn


def run(params, settings, seed=0, prompt=PROMPT, eos_id=None):
    return sample(MODEL, params, prompt, jax.random.key(seed), settings, eos_id)


def step_by_step(params, prompt, count):
    """Greedy continuation with full forward passes over a growing text, without a cache."""
    tokens = np.asarray(prompt).tolist()
    forward = jax.jit(lambda ids: MODEL.apply({"params": params}, ids))
    for _ in range(count):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(forward(padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prompt", [[3, 1, 4], [12] * 11], ids=str)
def test_temperature_zero_takes_the_argmax_of_the_full_forward(params, prompt):
    prompt = jnp.array(prompt, jnp.int32)
    settings = SamplingSettings(CONTEXT - len(prompt), temperature=0)
    assert run(params, settings, prompt=prompt) == step_by_step(params, prompt, CONTEXT - len(prompt))
    assert len(set(run(params, GREEDY))) > 2  # or the other tests would prove little


def test_the_same_key_gives_the_same_tokens_and_another_key_gives_others(params):
    """The first tokens do not depend on the number of tokens."""
    short, settings = (SamplingSettings(count, temperature=2.0, top_k=0) for count in (4, 9))
    first = run(params, settings, seed=1)
    assert run(params, settings, seed=1) == first
    assert run(params, short, seed=1) == first[:4]
    assert len({tuple(run(params, settings, seed=seed)) for seed in range(5)}) > 1


def test_text_ends_before_the_first_eos_or_after_all_tokens(params):
    greedy = run(params, GREEDY)
    assert len(greedy) == 9
    eos = greedy[4]
    assert run(params, GREEDY, eos_id=eos) == greedy[: greedy.index(eos)]
    assert run(params, GREEDY, eos_id=greedy[0]) == []
    unseen = next(token for token in range(VOCAB) if token not in greedy)
    assert run(params, GREEDY, eos_id=unseen) == run(params, GREEDY, eos_id=None) == greedy


def frequencies(logits, settings, draws=4000):
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = jax.jit(jax.vmap(lambda key: choose(jnp.asarray(logits, jnp.float32), key, settings)))(keys)
    counts = Counter(np.asarray(tokens).tolist())
    return [counts[token] / draws for token in range(len(logits))]


LOGITS = [1.0, 3.0, 0.0, 2.0]


@pytest.mark.parametrize(("temperature", "top_k"), [(0.5, 2), (1.0, 0), (1.0, 50), (2.0, 3), (5.0, 1)])
def test_choices_follow_the_softmax_of_the_k_largest(temperature, top_k):
    kept = sorted(LOGITS)[-top_k:] if top_k else LOGITS
    weights = np.array([np.exp(logit / temperature) if logit in kept else 0 for logit in LOGITS])
    expected = weights / weights.sum()
    found = frequencies(LOGITS, SamplingSettings(1, temperature, top_k))
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert [f == 0 for f, e in zip(found, expected, strict=True) if e == 0] == [True] * int((expected == 0).sum())


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(0, 0.6, [3.0]), (0, 0.7, [3.0, 2.0]), (2, 0.999, [3.0, 2.0]), (0, 0, [3.0])]
)
def test_choices_are_among_the_most_likely_with_this_probability(top_k, top_p, kept):
    weights = np.array([np.exp(logit) if logit in kept else 0 for logit in LOGITS])
    found = frequencies(LOGITS, SamplingSettings(1, 1.0, top_k, top_p))
    np.testing.assert_allclose(found, weights / weights.sum(), atol=0.03)


def test_a_batch_of_prompts_has_the_greedy_text_of_each_and_any_number_of_rows(params):
    prompts = [[3, 1, 4], [2], [5, 6, 7, 8]]
    settings = SamplingSettings(6, temperature=0)
    tokens, lengths = pad_prompts(prompts, 4)
    assert (tokens.shape, lengths.tolist()) == ((4, 4), [3, 1, 4, 4])
    batch = build_batch_sampler(MODEL, build_layout(PartitioningConfig()), "float32", settings)
    found = np.asarray(batch(params, tokens, lengths, np.uint32(0)))[:3].tolist()
    assert found == [sample(MODEL, params, jnp.array(prompt), jax.random.key(0), settings, None) for prompt in prompts]


def test_choices_at_the_limits_of_the_settings():
    """Temperature 0 ignores the key and top_k; exactly k of equal logits are kept; a tiny temperature gives no NaN."""
    assert frequencies(LOGITS, SamplingSettings(1, 0, 50), draws=50) == [0, 1, 0, 0]
    assert sum(f > 0 for f in frequencies([1.0, 1.0, 1.0, 1.0, 0.0], SamplingSettings(1, 1.0, 2), draws=500)) == 2
    assert frequencies(LOGITS, SamplingSettings(1, 1e-30, 0), draws=50) == [0, 1, 0, 0]


SMALL = Gpt2LM(Gpt2Config(seq_len=12, hidden_dim=8, num_heads=2, num_layers=1), 13)


def most_likely(logits_BV, positions):
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def test_rows_of_different_lengths_continue_as_each_alone_and_padding_is_not_read():
    apply = functools.partial(SMALL.apply, {"params": quick.random_params(SMALL)})
    prompts = [[3, 1, 4, 1], [5, 9]]
    alone = []
    for prompt in prompts:
        padded = jnp.array([prompt + [0] * (6 - len(prompt))])
        token, cache = step(apply, apply(1, 12, method="empty_cache"), padded, 0, most_likely, last=len(prompt) - 1)
        text = [int(token[0])]
        for position in range(len(prompt), len(prompt) + 4):
            token, cache = step(apply, cache, token[:, None], position, most_likely)
            text.append(int(token[0]))
        alone.append(text)
    lengths = jnp.array([len(prompt) for prompt in prompts])
    tokens = jnp.array([prompt + [0] * (4 - len(prompt)) for prompt in prompts])
    _, cache = apply(tokens, apply(2, 12, method="empty_cache"), 0, method="extend")
    together, _ = decode(apply, cache, tokens[jnp.arange(2), lengths - 1], lengths - 1, 5, most_likely)
    np.testing.assert_array_equal(together, alone)


def position_of(logits_BV, position):
    return jnp.asarray(position)[None]


def test_the_choice_gets_the_position_before_the_new_token():
    apply = functools.partial(SMALL.apply, {"params": quick.random_params(SMALL)})
    first, cache = step(apply, apply(1, 12, method="empty_cache"), jnp.array([[7, 8, 9]]), 0, position_of)
    tokens, _ = decode(apply, cache, first, 3, 3, position_of)
    assert (first.tolist(), tokens.tolist()) == ([2], [[3, 4, 5]])


SIZES = {"seq_len": 128, "hidden_dim": 16, "num_heads": 2, "num_layers": 2}


def with_windows(**sizes):
    """Layers whose cache is shorter than prompts and chunks, next to full ones; with sinks."""
    return LlamaConfig(**sizes, layer_pattern=["sliding", "full"], sliding_window=20, attention_sinks=True)


@pytest.mark.parametrize(
    "config",
    [
        with_windows,
        *(pytest.param(o, marks=pytest.mark.long) for o in (LlamaConfig, Gpt2Config, MptConfig, BackpackConfig)),
    ],
)
def test_greedy_texts_of_a_batch_are_those_of_each_prompt_alone(config):
    model, params = quick.writing_model(config(**SIZES), 40)
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 40, length).tolist() for length in (90, 70, 66, 66)]
    settings = SamplingSettings(37, temperature=0)
    alone = [
        sample(model, params, jnp.array(prompt, jnp.int32), jax.random.key(0), settings, eos_id=None)
        for prompt in prompts
    ]
    decoder = GreedyDecoder(model, build_layout(PartitioningConfig()), "float32")
    found = decoder(params, prompts, 37, 128, lambda row, new: False)
    assert found == alone
    soon = decoder(params, prompts, 37, 128, lambda row, new: len(new) >= 3)
    assert all(3 <= len(new) < 37 for new in soon)
    assert soon == [new[: len(short)] for new, short in zip(alone, soon, strict=True)]


def test_a_prompt_starts_with_the_bos_token_once_if_documents_do():
    tokenizer = load_tokenizer(str(TOKENIZER))
    bos = tokenizer.bos_id
    ids = encode_prompt(tokenizer, "a text", "--prompt", bos=False)
    assert bos not in ids
    for prompt in ("a text", "<|endoftext|>a text"):
        assert encode_prompt(tokenizer, prompt, "--prompt", bos=True) == [bos, *ids]
    assert encode_prompt(tokenizer, "", "--prompt", bos=False) == [bos]
    without = replace(tokenizer, bos_id=None)
    assert encode_prompt(without, "a text", "--prompt", bos=True) == ids


@pytest.mark.parametrize("adds", [False, True])
def test_that_of_a_run_follows_its_setting_and_that_of_a_hugging_face_model_its_tokenizer(adds):
    tokenizer = load_tokenizer(str(TOKENIZER))
    library = type(tokenizer.library).from_str(tokenizer.library.to_str())
    end = "<|endoftext|>"
    library.post_processor = TemplateProcessing(
        single=f"{end} $A" if adds else "$A", special_tokens=[(end, tokenizer.bos_id)]
    )
    tokenizer = replace(tokenizer, library=library)
    config = RunConfig.model_validate({"data": {"enforce_bos": not adds}})
    model = TrainedModel(source="x", step=None, config=config, tokenizer=tokenizer, get_params=lambda *_: None)
    assert starts_with_bos(model) == adds
    assert starts_with_bos(replace(model, origin=ModelOrigin("run", "data"))) == (not adds)
