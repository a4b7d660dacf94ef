"""Greedy decoding of two tokens at a time, with the guesses of a model's module that predicts one token more (`mtp`).

Leviathan et al. 2022, "Fast Inference from Transformers via Speculative Decoding". Each pass reads the last token and a
guess of the next one. Every token is the most likely one after the tokens before it, so that the text is that of greedy
decoding, whatever the guesses; a right guess saves a pass. A pass of two tokens rounds differently than two of one:
where two tokens are equally likely but for rounding, the other one can be taken.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lmtrain.models.interface import LanguageModel


class Guessed(NamedTuple):
    """New tokens, and the number of passes of the model over new tokens that they took."""

    tokens: list[int]
    passes: int


def decode_with_guesses(model: LanguageModel, params: Any, prompt_S: jax.Array, count: int) -> Guessed:
    """The `count` most likely tokens after `prompt_S`. The model has modules that predict further tokens (`mtp`)."""
    tokens, passes = jax.device_get(_decode(model, params, prompt_S, count))
    return Guessed(tokens[:count].tolist(), int(passes))


class _State(NamedTuple):
    """`number` new tokens are known, of which the last is at position `at`; `guess` is that of the next one. The caches
    have the positions before `at`, and perhaps one more, which is read again."""

    tokens: jax.Array
    number: jax.Array
    at: jax.Array
    guess: jax.Array
    cache: Any
    guesses: Any
    passes: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 3))
def _decode(model: LanguageModel, params: Any, prompt_S: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    apply = functools.partial(model.apply, {"params": params})
    length = len(prompt_S)
    room = length + count + 2

    def most_likely(hidden_S: jax.Array) -> jax.Array:
        """The tokens [S] after hidden states [S, D]."""
        return jnp.argmax(apply(hidden_S[None], method="logits")[0], axis=-1).astype(jnp.int32)

    def read(tokens_S: jax.Array, cache: Any, start: Any) -> tuple[jax.Array, Any]:
        embedded = apply(tokens_S[None], method="embed")
        hidden, cache = apply(embedded, cache, start, method="read_more")
        return hidden[0], cache

    def guess(hidden_S: jax.Array, next_S: jax.Array, guesses: Any, start: Any, used: Any) -> tuple[jax.Array, Any]:
        """The token after the next one of each position, of which the first `used` enter the module's cache."""
        found, guesses = apply(hidden_S[None], next_S[None], guesses, start, used, method="look_ahead")
        return most_likely(found[0]), guesses

    hidden, cache = read(prompt_S, apply(1, room, method="empty_cache"), 0)
    first = most_likely(hidden[-1:])[0]
    following = jnp.append(prompt_S[1:], first)
    found, guesses = guess(hidden, following, apply(1, room, method="empty_look_ahead"), 0, length)
    tokens = jnp.zeros(count + 1, jnp.int32).at[0].set(first)
    begin = _State(tokens, jnp.int32(1), jnp.int32(length), found[-1], cache, guesses, jnp.int32(0))

    def add(state: _State) -> _State:
        last = state.tokens[state.number - 1]
        hidden, cache = read(jnp.stack([last, state.guess]), state.cache, state.at)
        likely = most_likely(hidden)
        new = 1 + (likely[0] == state.guess).astype(jnp.int32)
        # the second token is overwritten if the guess was wrong
        tokens = jax.lax.dynamic_update_slice(state.tokens, likely, (state.number,))
        found, guesses = guess(hidden, likely, state.guesses, state.at, new)
        return _State(tokens, state.number + new, state.at + new, found[new - 1], cache, guesses, state.passes + 1)

    end = jax.lax.while_loop(lambda state: state.number < count, add, begin)
    return end.tokens, end.passes
