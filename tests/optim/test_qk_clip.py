"""QK-clip: measured scores, and products of queries and keys that are scaled back, head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import families, quick

from lmtrain.models.attention.attend import SCORES, highest_scores
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.interface import outputs_of
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.models.params import parameter_axes
from lmtrain.models.registry import build_model
from lmtrain.optim.config import MuonConfig
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.qk_clip import clip_qk
from lmtrain.run.config import RunConfig

SIZES = {"hidden_dim": 16, "num_heads": 4, "num_layers": 3, "seq_len": families.LENGTH, "pad_vocab_to_multiple_of": 8}
LLAMA = LlamaConfig(**SIZES, num_kv_heads=2, intermediate_dim=24, use_bias=True)
BATCH = families.BATCH


def measured(model, params):
    _, sown = jax.jit(lambda p: model.apply({"params": p}, BATCH, True, method=outputs_of, mutable=[SCORES]))(params)
    return {"blocks/attn": sown[SCORES]["blocks"]["attn"]["highest"][0]}


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("length", [12, 1024 + 4])
def test_scores_are_those_of_keys_that_a_query_sees(window, length):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, heads, length, 3)).astype(np.float32) for heads in (4, 2))
    segments = np.cumsum(rng.random((2, length)) < 0.2, axis=1)
    found = jax.jit(lambda *arrays: highest_scores(*arrays[:2], 0.5, window, arrays[2]))(q, k, segments)
    scores = 0.5 * np.einsum("bhsc,bhtc->bhst", q, np.repeat(k, 2, axis=1))
    s, t = np.arange(length)[:, None], np.arange(length)
    seen = (t <= s) & (t > s - (window or length)) & (segments[:, None, :, None] == segments[:, None, None, :])
    np.testing.assert_allclose(found, np.where(seen, scores, -np.inf).max((0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("config", [LLAMA, Gpt2Config(**SIZES)], ids=["grouped", "joint"])
def test_scores_above_the_threshold_become_the_threshold_and_others_stay(config):
    model = build_model(config, families.VOCAB)
    params = quick.random_params(model)
    before = measured(model, params)
    threshold = float(np.median(before["blocks/attn"]))
    optimizer = clip_qk(optax.with_extra_args_support(optax.sgd(0.0)), threshold, parameter_axes(model))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params, scores=before)
    after = optax.apply_updates(params, updates)
    # the first layer alone: the input of later ones changes with it
    highest = np.asarray(before["blocks/attn"])
    found = np.asarray(measured(model, after)["blocks/attn"])
    assert (highest[0] > threshold).any()
    np.testing.assert_allclose(found[0], np.minimum(highest[0], threshold), rtol=1e-4)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, after)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): c for path, c in jax.tree.leaves_with_path(changed)}
    assert {path for path, is_changed in flat.items() if is_changed} == {
        path for path in flat if path.split("/")[-2] in ("q", "k", "qkv")
    }
    if isinstance(config, Gpt2Config):  # values stay
        values = [tree["blocks"]["attn"]["qkv"]["kernel"][:, :, 2] for tree in (after, params)]
        np.testing.assert_array_equal(*values)


@pytest.mark.parametrize(
    "model", [build_model(LLAMA, families.VOCAB), families.window_model(4)], ids=["scan", "pattern"]
)
def test_a_step_keeps_scores_below_the_threshold_for_any_number_of_microbatches(model):
    params = quick.random_params(model)
    threshold = float(np.median(measured(model, params)["blocks/attn"]))
    config = MuonConfig(learning_rate=1e-9, adam_lr=1e-9, qk_clip=threshold)
    optimizer = build_optimizer(config, lambda _: 1e-9, parameter_axes(model))
    states = []
    for number in (1, 4):
        step = quick.build_step(model, optimizer=optimizer, microbatches=number, qk_clip=threshold)
        state, metrics, _ = step(quick.new_state(params, optimizer), BATCH)
        assert float(metrics["train/highest_score"]) == pytest.approx(
            float(measured(model, params)["blocks/attn"].max()), rel=1e-4
        )
        found = np.asarray(measured(model, state.params)["blocks/attn"])
        assert found[0].max() <= threshold * (1 + 1e-3)
        states.append(state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *states)


def test_qk_clip_with_normalized_queries_is_an_error():
    with pytest.raises(ValueError, match="qk_norm"):
        RunConfig(model={"type": "llama", "qk_norm": "head"}, optimizer={"type": "muon", "qk_clip": 100.0})
