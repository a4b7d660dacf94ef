"""Sampling: one pass over the prompt fills the KV cache, then one token at a time, all in one compiled program."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lmtrain.generation.decode import decode, step
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import cast_to_compute
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.mesh_function import MeshFunction


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
    return until_eos(jax.device_get(_sample(model, params, prompt_S, key, settings)).tolist(), eos_id)


def until_eos(tokens: list[int], eos_id: int | None) -> list[int]:
    """The tokens before the first `eos_id`."""
    return tokens[: tokens.index(eos_id)] if eos_id in tokens else tokens


@functools.partial(jax.jit, static_argnums=(0, 4))
def _sample(
    model: LanguageModel, params: Any, prompt_S: jax.Array, key: jax.Array, settings: SamplingSettings
) -> jax.Array:
    apply = functools.partial(model.apply, {"params": params})
    prompt_length = prompt_S.shape[0]

    def choose_next(logits_BV: jax.Array, position: jax.Array) -> jax.Array:
        return choose(logits_BV[0], jax.random.fold_in(key, position - (prompt_length - 1)), settings)[None]

    cache = apply(1, prompt_length + settings.max_new_tokens, method="empty_cache")
    first_B, cache = step(apply, cache, prompt_S[None], 0, choose_next)
    others_BS, _ = decode(apply, cache, first_B, prompt_length, settings.max_new_tokens - 1, choose_next)
    return jnp.concatenate([first_B, others_BS[0]])


def build_batch_sampler(
    model: LanguageModel,
    layout: Layout,
    compute_dtype: str,
    settings: SamplingSettings,
    options: Mapping[str, Any] | None = None,
) -> MeshFunction:
    """The jitted (params, prompts [B, S], lengths [B], seed) -> new tokens [B, max_new_tokens], on `layout`.

    Row b of `prompts` has `lengths[b]` tokens; the rest is ignored. B is a multiple of the number of batch shards, and
    S plus the new tokens fits the model's context. The prompts are read at once, and all rows continue together. A
    row's tokens depend on the seed and the row's number.
    """

    def run(params: Any, prompts: jax.Array, lengths: jax.Array, seed: jax.Array) -> jax.Array:
        apply = functools.partial(model.apply, {"params": cast_to_compute(params, compute_dtype)})
        rows, longest = prompts.shape
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(rows))

        def choose_next(logits_BV: jax.Array, positions: jax.Array) -> jax.Array:
            step_keys = jax.vmap(jax.random.fold_in)(keys, positions)
            return jax.vmap(functools.partial(choose, settings=settings))(logits_BV, step_keys)

        cache = apply(rows, longest + settings.max_new_tokens, method="empty_cache")
        _, cache = apply(prompts, cache, 0, lengths, method="extend")
        last = jnp.take_along_axis(prompts, lengths[:, None] - 1, axis=1)[:, 0]
        return decode(apply, cache, last, lengths - 1, settings.max_new_tokens, choose_next)[0]

    return MeshFunction(layout, jax.jit(run, out_shardings=layout.replicated, compiler_options=dict(options or {})))


def choose(logits_V: jax.Array, key: jax.Array, settings: SamplingSettings) -> jax.Array:
    """Sample one token id from float32 logits."""
    if settings.temperature == 0:
        return jnp.argmax(logits_V).astype(jnp.int32)
    if 0 < settings.top_k < logits_V.shape[0]:
        best, ids = jax.lax.top_k(logits_V, settings.top_k)
        return ids[jax.random.categorical(key, best / settings.temperature)].astype(jnp.int32)
    return jax.random.categorical(key, logits_V / settings.temperature).astype(jnp.int32)
