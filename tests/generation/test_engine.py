"""Requests that come and go get the tokens that each has alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from parity.variants import LINEAR

from lmtrain.generation.decode import SamplingSettings, choose
from lmtrain.generation.engine import Engine, Request, choose_each
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.runtime.errors import UserError

LENGTH, VOCAB = 96, 40
SIZES = {"seq_len": LENGTH, "hidden_dim": 16, "num_heads": 2}
WINDOW = {"layer_pattern": ["sliding", "full"], "sliding_window": 24, "num_layers": 2}
CONFIGS = {
    "full": Gpt2Config(**SIZES, num_layers=1),
    "windows": LlamaConfig(**SIZES, **WINDOW),
    "linear": LlamaConfig(
        **SIZES, num_layers=2, layer_pattern=["linear", "full"], linear_attention=LINEAR, layer_norm_epsilon=0.1
    ),
    "latent": LlamaConfig(**SIZES, num_layers=1, latent_attention={"kv_lora_rank": 12, "qk_rope_head_dim": 4}),
}


LONG = ("full", "latent")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CONFIGS]
)
def small(request):
    return quick.writing_model(CONFIGS[request.param], VOCAB)


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, length).tolist() for length in lengths]


def greedy(ids, new, **more):
    return Request(ids=ids, settings=SamplingSettings(new, temperature=0), **more)


def finish(engine):
    steps = 1
    while engine.step():
        steps += 1
    return steps


def alone(small, ids, new):
    """The most likely tokens by complete forward passes."""
    model, params = small
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(ids)] = ids
    for end in range(len(ids), len(ids) + new):
        tokens[0, end] = np.asarray(_forward(model, params, tokens))[0, end - 1].argmax()
    return tokens[0, len(ids) : len(ids) + new].tolist()


_forward = jax.jit(lambda model, params, tokens: model.apply({"params": params}, tokens)[..., :VOCAB], static_argnums=0)


def test_requests_that_come_and_go_have_the_tokens_of_each_alone(small):
    """Five in three rows: some wait, two come while others are written, two continue conversations that a row has."""
    engine = Engine(*small, LENGTH, rows=3)
    asked = [greedy(ids, new) for ids, new in zip(prompts(3, 70, 1), (20, 9, 30), strict=True)]
    for request in asked[:2]:
        engine.add(request)
    for _ in range(4):
        assert engine.step()
    engine.add(asked[2])
    engine.step()
    follow_ups = [greedy([*asked[0].ids, *asked[0].new[:2], 5, 6, 7], 8), greedy(prompts(40, seed=1)[0], 12)]
    for request in follow_ups:
        engine.add(request)
    finish(engine)
    again = greedy([*follow_ups[0].ids, *follow_ups[0].new, 9], 5)
    engine.add(again)
    finish(engine)
    for request in (*asked, *follow_ups, again):
        assert request.reason == "length"
        assert request.new == alone(small, request.ids, request.settings.max_new_tokens)


def test_a_request_ends_at_its_tokens_at_the_context_and_when_it_is_cancelled(small):
    engine = Engine(*small, LENGTH, rows=2)
    (ids,) = prompts(5)
    expected = alone(small, ids, 12)
    stop = expected[7]
    ended, long, cancelled = greedy(ids, 12, ends={stop, None}), greedy(prompts(90)[0], 50), greedy(ids, 50)
    for request in (ended, long, cancelled):
        engine.add(request)
    while len(cancelled.new) < 3:
        engine.step()
    engine.cancel(cancelled)
    finish(engine)
    assert (ended.reason, ended.new) == ("stop", expected[: expected.index(stop)])
    assert (long.reason, len(long.new)) == ("length", LENGTH - 90)
    assert (cancelled.reason, cancelled.new) == ("cancelled", expected[:3])
    waiting = engine.add(greedy(ids, 5))
    engine.cancel(waiting)
    assert not engine.step()
    assert waiting.new == []


def test_caches_that_do_not_fit_are_an_error():
    with pytest.raises(UserError, match=r"100,000,000 x 96 .*--parallel"):
        Engine(*quick.writing_model(CONFIGS["full"], VOCAB), LENGTH, rows=10**8)


def test_what_a_conversation_already_has_is_not_read_again():
    small = quick.writing_model(CONFIGS["full"], VOCAB)
    engine = Engine(*small, LENGTH, rows=2)
    first, other = (engine.add(greedy(ids, 4)) for ids in prompts(20, 10))
    finish(engine)
    third, fourth = (engine.add(greedy(ids, 4)) for ids in ([*first.ids, *first.new, 1, 2], [*other.ids, 1]))
    finish(engine)
    # the last of the new tokens was not read yet
    assert [request.cached for request in (first, other, third, fourth)] == [0, 0, 23, 10]


def test_samples_depend_on_the_seed_and_not_on_other_requests():
    small = quick.writing_model(CONFIGS["full"], VOCAB)
    hot = SamplingSettings(20, temperature=1.5, top_k=0, top_p=0.95)
    (ids,) = prompts(6)

    def tokens(*others, seed=3):
        engine = Engine(*small, LENGTH, rows=3)
        for request in others:
            engine.add(request)
        request = engine.add(Request(ids=ids, settings=hot, seed=seed))
        finish(engine)
        return request.new

    first = tokens()
    assert first == tokens(greedy(ids, 30), Request(ids=[4], settings=hot, seed=8))
    assert first != tokens(seed=4)


@pytest.mark.parametrize("vocab", [40, 400])
def test_each_row_is_sampled_by_its_own_settings(vocab):
    """Frequencies over 4,000 seeds are the probabilities of `choose`'s definition."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (1, vocab)), jnp.float32)
    number = 4_000
    for temperature, top_k, top_p in ((0.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (0.9, 0, 0.6), (1.0, 300, 0.9)):
        seeds = np.arange(number, dtype=np.uint32)
        rows = jnp.broadcast_to(logits, (number, vocab))
        each = (np.full(number, value, kind) for value, kind in ((temperature, "f4"), (top_k, "i4"), (top_p, "f4")))
        found = np.bincount(jax.jit(choose_each)(rows, 7, seeds, *each), minlength=vocab) / number
        settings = SamplingSettings(1, temperature, top_k, top_p)
        keys = jax.random.split(jax.random.key(1), number)
        expected = np.bincount(jax.vmap(lambda key, s=settings: choose(logits[0], key, s))(keys), minlength=vocab)
        expected = expected / number
        assert np.abs(found - expected).max() < 0.04
        assert set(np.flatnonzero(found > 0.01)) <= set(np.flatnonzero(expected))
        if top_k == 5:
            assert np.count_nonzero(found) == 5
