"""Sampling against the full forward pass, one token at a time."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.meta import unbox

from lmtrain.generation.decode import SamplingSettings, choose, sample
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM

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


@pytest.mark.parametrize("prompt", [[3, 1, 4], [0], [12] * 11], ids=str)
def test_temperature_zero_takes_the_argmax_of_the_full_forward(params, prompt):
    prompt = jnp.array(prompt, jnp.int32)
    settings = SamplingSettings(CONTEXT - len(prompt), temperature=0)
    assert run(params, settings, prompt=prompt) == step_by_step(params, prompt, CONTEXT - len(prompt))
    assert len(set(run(params, GREEDY))) > 2  # or the other tests would prove little


def test_the_same_key_gives_the_same_tokens_and_another_key_gives_others(params):
    settings = SamplingSettings(9, temperature=2.0, top_k=0)
    assert run(params, settings, seed=1) == run(params, settings, seed=1)
    assert len({tuple(run(params, settings, seed=seed)) for seed in range(5)}) > 1


def test_top_k_one_is_greedy_at_any_temperature(params):
    greedy = run(params, GREEDY)
    assert run(params, SamplingSettings(9, temperature=5.0, top_k=1), seed=3) == greedy


def test_text_ends_before_the_first_eos(params):
    greedy = run(params, GREEDY)
    eos = greedy[4]
    assert run(params, GREEDY, eos_id=eos) == greedy[: greedy.index(eos)]
    assert run(params, GREEDY, eos_id=greedy[0]) == []


def test_without_eos_all_tokens_are_returned(params):
    greedy = run(params, GREEDY)
    unseen = next(token for token in range(VOCAB) if token not in greedy)
    assert run(params, GREEDY, eos_id=unseen) == run(params, GREEDY, eos_id=None) == greedy
    assert len(greedy) == 9


def test_a_longer_text_starts_with_the_shorter_one(params):
    short, long = (SamplingSettings(count, temperature=2.0, top_k=0) for count in (4, 9))
    assert run(params, long, seed=2)[:4] == run(params, short, seed=2)


def frequencies(logits, settings, draws=4000):
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = jax.jit(jax.vmap(lambda key: choose(jnp.asarray(logits, jnp.float32), key, settings)))(keys)
    counts = Counter(np.asarray(tokens).tolist())
    return [counts[token] / draws for token in range(len(logits))]


LOGITS = [1.0, 3.0, 0.0, 2.0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 2, 3, 4, 50])
def test_choices_follow_the_softmax_of_the_k_largest(temperature, top_k):
    kept = sorted(LOGITS)[-top_k:] if top_k else LOGITS
    weights = np.array([np.exp(logit / temperature) if logit in kept else 0 for logit in LOGITS])
    expected = weights / weights.sum()
    found = frequencies(LOGITS, SamplingSettings(1, temperature, top_k))
    np.testing.assert_allclose(found, expected, atol=0.03)
    assert [f == 0 for f, e in zip(found, expected, strict=True) if e == 0] == [True] * int((expected == 0).sum())


def test_temperature_zero_ignores_key_and_top_k():
    assert frequencies(LOGITS, SamplingSettings(1, 0, 50), draws=50) == [0, 1, 0, 0]


def test_top_k_keeps_exactly_k_of_equal_logits():
    found = frequencies([1.0, 1.0, 1.0, 1.0, 0.0], SamplingSettings(1, 1.0, 2), draws=500)
    assert sum(f > 0 for f in found) == 2


def test_a_tiny_temperature_is_nearly_greedy_not_nan():
    assert frequencies(LOGITS, SamplingSettings(1, 1e-30, 0), draws=50) == [0, 1, 0, 0]
