"""Sampling: one pass over the prompt fills the KV cache, then one token at a time, all in one compiled program."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.models.interface import LanguageModel


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings. `temperature` 0 selects the most likely token; `top_k` 0 disables top-k sampling."""

    max_new_tokens: int
    temperature: float = 0.8
    top_k: int = 50


def sample(
    model: LanguageModel,
    params: Any,
    prompt_S: jax.Array,
    key: jax.Array,
    settings: SamplingSettings,
    eos_id: int | None,
) -> list[int]:
    """New token ids after `prompt_S`: at most `max_new_tokens`, and none from the first `eos_id` on.

    The same key gives the same tokens. Prompt and new tokens together must fit the model's context.
    """
    tokens = jax.device_get(_sample(model, params, prompt_S, key, settings)).tolist()
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sample(
    model: LanguageModel, params: Any, prompt_S: jax.Array, key: jax.Array, settings: SamplingSettings
) -> jax.Array:
    apply = functools.partial(model.apply, {"params": params})
    length = prompt_S.shape[0] + settings.max_new_tokens
    cache = apply(1, length, method="empty_cache")
    logits, cache = apply(prompt_S[None], cache, 0, method="extend")

    def one(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
        last, cache = carry
        token = choose(last, jax.random.fold_in(key, index), settings)
        logits, cache = apply(token[None, None], cache, prompt_S.shape[0] + index, method="extend")
        return (logits[0, -1], cache), token

    _, tokens = jax.lax.scan(one, (logits[0, -1], cache), jnp.arange(settings.max_new_tokens))
    return tokens


def choose(logits_V: jax.Array, key: jax.Array, settings: SamplingSettings) -> jax.Array:
    """Sample one token id from float32 logits."""
    if settings.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    if 0 < settings.top_k < logits_V.shape[0]:
        best, ids = jax.lax.top_k(logits_V, settings.top_k)
        return ids[jax.random.categorical(key, best / settings.temperature)].astype(jnp.int32)
    return jax.random.categorical(key, logits_V / settings.temperature).astype(jnp.int32)
