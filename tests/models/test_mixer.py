"""A mixer of another kind, which only its own file knows: trained, packed, sampled from and planned as attention is.

`test_families.py` has its gradients on meshes of eight devices.
"""

import jax
import numpy as np
import pytest
from models import quick
from models.conv_mixer import TAPS, ConvMixer, conv_config
from models.families import BATCH, LENGTH, VOCAB

from lmtrain.models.interface import Documents
from lmtrain.models.mixer import AttentionMixer, linear_flops
from lmtrain.models.registry import build_model
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program

MODEL = build_model(conv_config(), VOCAB)
PARAMS = quick.random_params(MODEL)


def run_config(**trainer):
    config = RunConfig(trainer={"train_batch_size": 8, "num_train_steps": 4} | trainer)
    return config.model_copy(update={"model": conv_config()})


def test_its_gradients_do_not_depend_on_microbatches_and_documents_are_separate():
    quick.check_microbatches(MODEL, PARAMS, BATCH, [4])
    segments = np.arange(16).reshape(2, 8) // 3
    assert quick.reached_tokens(MODEL, PARAMS, segments) == [3, 4, 5, 6]
    whole = jax.jit(
        lambda tokens, *documents: MODEL.apply({"params": PARAMS}, tokens, True, *documents, method="hidden")
    )
    tokens = np.arange(12, dtype=np.int32)[None]
    packed = whole(tokens, Documents(np.array([[0] * 5 + [1] * 7]), np.array([[*range(5), *range(7)]])))
    np.testing.assert_allclose(packed[:, 5:], whole(tokens[:, 5:]), rtol=1e-4, atol=1e-5)


def test_the_cache_gives_the_logits_of_the_full_sequence_in_chunks_of_any_length():
    lengths = np.array([11, 6, 2])
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, LENGTH)).astype(np.int32)
    whole = jax.jit(MODEL.apply)({"params": PARAMS}, tokens)
    extend = jax.jit(lambda *given: MODEL.apply({"params": PARAMS}, *given, method="extend"))
    cache = MODEL.apply({"params": PARAMS}, 3, LENGTH, method="empty_cache")
    assert [state["inputs"].shape for state in cache.states if "inputs" in state] == [(2, 3, TAPS, 16)]
    for at in (0, 5):
        _, cache = extend(tokens[:, at : at + 5], cache, np.int32(at), np.clip(lengths - 1 - at, 0, 5))
    for more in range(3):
        position = np.minimum(lengths - 1 + more, LENGTH - 1)
        logits, cache = extend(tokens[np.arange(3), position][:, None], cache, position)
        np.testing.assert_allclose(logits[:, 0], whole[np.arange(3), position], rtol=1e-4, atol=1e-4)


def test_flops_needs_and_plans_ask_the_mixer():
    config = conv_config()
    conv, attention = config.mixers[:2]
    assert isinstance(conv, ConvMixer)
    assert isinstance(attention, AttentionMixer)
    mlps = 4 * 3 * linear_flops(16, 24)
    mixed = 2 * (2 * TAPS * 16) + 2 * sum(attention.flops(LENGTH, causal=False))
    assert config.num_flops_per_token(VOCAB) == mixed + mlps + linear_flops(16, VOCAB)
    assert config.attention_needs == attention.features


def test_a_run_trains_and_its_sequences_cannot_be_split():
    program = build_program(run_config(), VOCAB)
    state, losses = program.init(), []
    batch = {name: values[:8] for name, values in BATCH.items()}
    for _ in range(4):
        state, metrics, _ = program.train_step(state, batch)
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < losses[0]
    with pytest.raises(UserError, match=r"trainer\.context_axis_size"):
        build_program(run_config(context_axis_size=2), VOCAB)
