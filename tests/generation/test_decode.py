"""A step of decoding reads tokens at their positions; a loop of steps is the same as steps one by one."""

import functools

import jax.numpy as jnp
import numpy as np
from models import quick

from lmtrain.generation.decode import decode, step
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.gpt2.model import Gpt2LM

MODEL = Gpt2LM(Gpt2Config(seq_len=12, hidden_dim=8, num_heads=2, num_layers=1), 13)


def most_likely(logits_BV, positions):
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def test_rows_of_different_lengths_continue_as_each_alone_and_padding_is_not_read():
    apply = functools.partial(MODEL.apply, {"params": quick.random_params(MODEL)})
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
    apply = functools.partial(MODEL.apply, {"params": quick.random_params(MODEL)})
    first, cache = step(apply, apply(1, 12, method="empty_cache"), jnp.array([[7, 8, 9]]), 0, position_of)
    tokens, _ = decode(apply, cache, first, 3, 3, position_of)
    assert (first.tolist(), tokens.tolist()) == ([2], [[3, 4, 5]])
