"""Decoding with a KV cache: a step reads tokens and chooses the next one of each row; everything else repeats it.

    apply = functools.partial(model.apply, {"params": params})
    cache = apply(1, 64, method="empty_cache")                       # one row, 64 positions
    token, cache = step(apply, cache, [[5, 9, 7]], 0, choose)        # reads a prompt of three tokens; token: [42]
    tokens, cache = decode(apply, cache, token, 3, 10, choose)       # [[8, 30, ...]], the ten tokens after 42

`choose(logits [B, V], positions)` returns the next tokens [B]; `positions` are those of the tokens before them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Choose = Callable[[jax.Array, jax.Array], jax.Array]


def step(
    apply: Callable[..., Any],
    cache: Any,
    tokens_BS: jax.Array,
    start: Any,
    choose: Choose,
    last: Any = None,
) -> tuple[jax.Array, Any]:
    """Read tokens at the positions `start, start + 1, ...`; return the tokens [B] after them, and the cache.

    `start` is a scalar or [B]. `last` is the index of the last token, if padding follows it.
    """
    count = None if last is None or tokens_BS.shape[1] == 1 else last + 1  # one token is no padding
    last = tokens_BS.shape[1] - 1 if last is None else last
    logits_BSV, cache = apply(tokens_BS, cache, start, count, method="extend")
    return choose(logits_BSV[:, last], start + last), cache


def decode(
    apply: Callable[..., Any], cache: Any, token_B: jax.Array, start: Any, count: int, choose: Choose
) -> tuple[jax.Array, Any]:
    """The `count` tokens [B, count] after `token_B`, whose position is `start`, and the cache without the last one."""

    def next_token(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        token_B, cache = carry
        token_B, cache = step(apply, cache, token_B[:, None], start + index, choose)
        return (token_B, cache), token_B

    (_, cache), tokens = jax.lax.scan(next_token, (token_B, cache), jnp.arange(count))
    return tokens.T, cache
