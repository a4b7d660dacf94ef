"""Greedy text with guesses is that without, whatever the guesses; right guesses save passes."""

import jax
import numpy as np
import pytest
from parity.variants import VOCAB, make, tokens

from lmtrain.generation.decode import SamplingSettings, sample
from lmtrain.generation.speculative import decode_with_guesses
from lmtrain.models.params import flatten, unflatten

NEW = 24


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "qwen3_5"])
def test_the_text_is_that_of_greedy_decoding(name):
    """Of latent attention and experts, of caches that forget positions, and of linear layers."""
    variant = make(name, mtp={"num_modules": 2}, tie_word_embeddings=False, seq_len=64)
    settings = SamplingSettings(max_new_tokens=NEW, temperature=0)
    for row in range(2):
        prompt = tokens()[row, :7]
        expected = sample(variant.model, variant.params, prompt, jax.random.key(0), settings, None)
        found = decode_with_guesses(variant.model, variant.params, prompt, NEW)
        assert found.tokens == expected
        assert len(set(found.tokens)) > 1
        assert found.passes <= NEW - 1


def test_right_guesses_save_half_of_the_passes():
    """The model repeats its last token, which its module guesses: blocks add nothing, and the head reads embeddings."""
    variant = make("llama", mtp={}, tie_word_embeddings=True, seq_len=64)
    values = dict(flatten(variant.params))
    for path, value in values.items():
        if path.endswith(("attn/out/kernel", "down/kernel")):
            values[path] = np.zeros_like(value)
    hidden = variant.config.hidden_dim
    values["mtp/project/kernel"] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))])[None].astype(np.float32)
    values |= {path: np.ones_like(value) for path, value in values.items() if "norm_" in path}
    values["tokens/embedding"] = np.random.default_rng(0).normal(size=(VOCAB + 38, hidden)).astype(np.float32)
    table = values["tokens/embedding"]
    values["tokens/embedding"] = table / np.linalg.norm(table, axis=1, keepdims=True)
    found = decode_with_guesses(variant.model, unflatten(values), tokens()[0, :7], NEW)
    assert found.tokens == [int(tokens()[0, 6])] * NEW
    assert found.passes == (NEW - 1 + 1) // 2
