"""Decoding with a KV cache: a step reads tokens and chooses the next one of each row; everything else repeats it.

    apply = functools.partial(model.apply, {"params": params})
    cache = apply(1, 64, method="empty_cache")                       # one row, 64 positions
    token, cache = step(apply, cache, [[5, 9, 7]], 0, choose)        # reads a prompt of three tokens; token: [42]
    tokens, cache = decode(apply, cache, token, 3, 10, choose)       # [[8, 30, ...]], the ten tokens after 42

`choose(logits [B, V], positions)` returns the next tokens [B]; `positions` are those of the tokens before them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, cast_to_compute
from lmtrain.sharding.mesh import Layout, MeshFunction

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


@dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings. `temperature` 0 selects the most likely token; `top_k` 0 disables top-k sampling; `top_p` 1
    disables nucleus sampling (Holtzman et al. 2019), which follows the other two."""

    max_new_tokens: int
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0


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


def pad_prompts(prompts: Sequence[Sequence[int]], multiple: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as one array [rows, longest], and the length of each [rows]; the last one fills up a multiple of rows."""
    filled = [*prompts, *[prompts[-1]] * (-len(prompts) % multiple)]
    lengths = np.array([len(prompt) for prompt in filled], np.int32)
    tokens = np.zeros((len(filled), lengths.max()), np.int32)
    for row, prompt in enumerate(filled):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths


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
    vocab_size = logits_V.shape[0]
    is_cut = 0 < settings.top_k < vocab_size
    if is_cut or settings.top_p < 1:
        best, ids = jax.lax.top_k(logits_V, settings.top_k if is_cut else vocab_size)  # descending
        best = best / settings.temperature
        if settings.top_p < 1:
            probabilities = jax.nn.softmax(best)
            best = jnp.where(jnp.cumsum(probabilities) - probabilities < settings.top_p, best, -jnp.inf)
        return ids[jax.random.categorical(key, best)].astype(jnp.int32)
    return jax.random.categorical(key, logits_V / settings.temperature).astype(jnp.int32)


# Tokens per call of a program: of the prompts, which are read at once, and of new ones, which come one by one.
_PROMPT_CHUNK = 64
_NEW_CHUNK = 16


class GreedyDecoder:
    """Decodes batches of prompts on `layout`; programs are compiled once for each batch size and cache length."""

    def __init__(
        self, model: LanguageModel, layout: Layout, compute_dtype: str, options: Mapping[str, Any] | None = None
    ):
        self._model = model
        self._layout = layout
        self._dtype = compute_dtype
        self._options = dict(options or {})
        self._programs = functools.lru_cache(maxsize=32)(self._build)

    def __call__(
        self,
        params: Any,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        cache_length: int,
        is_complete: Callable[[int, list[int]], bool],
        between: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """The most likely tokens after each prompt, at most `max_new`.

        The number of prompts is a multiple of the layout's batch shards; prompts have at least one token, and fit into
        `cache_length` positions with the new tokens.
        `is_complete(row, new tokens)` is asked after every few tokens whether a row needs no more; more may come back.
        `between` is called after every few tokens, equally often in all processes.
        """
        rows, lengths = len(prompts), np.array([len(prompt) for prompt in prompts], np.int32)
        empty, read, write = self._programs(rows, cache_length)
        chunk = min(_PROMPT_CHUNK, cache_length)
        padded = np.zeros((rows, cache_length), np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = prompt
        cache = empty(params)
        for at in range(0, int(lengths.max()) - 1, chunk):
            part = padded[:, at : at + chunk]
            cache = read(params, cache, part, np.int32(at), np.clip(lengths - 1 - at, 0, part.shape[1]))
        new, positions = padded[np.arange(rows), lengths - 1][:, None], lengths - 1
        unfinished = set(range(rows))
        while unfinished:
            tokens, cache = write(params, cache, new[:, -1], positions)
            new, positions = np.concatenate([new, np.asarray(tokens)], axis=1), positions + _NEW_CHUNK
            between()
            texts = new[:, 1 : max_new + 1].tolist()
            unfinished -= {
                row for row in sorted(unfinished) if len(texts[row]) == max_new or is_complete(row, texts[row])
            }
        return texts

    def _build(self, rows: int, length: int) -> tuple[MeshFunction, MeshFunction, MeshFunction]:
        """Programs for an empty cache, for tokens of the prompts, and for new tokens."""
        layout = self._layout
        shardings = self._cache_shardings(length)
        compile_as = functools.partial(jax.jit, compiler_options=self._options)

        def applied(params: Any) -> Callable[..., Any]:
            return functools.partial(self._model.apply, {"params": cast_to_compute(params, self._dtype)})

        def empty(params: Any) -> Any:
            return applied(params)(rows, length, method="empty_cache")

        def read(params: Any, cache: Any, tokens: jax.Array, start: jax.Array, count: jax.Array) -> Any:
            return applied(params)(tokens, cache, start, count, method="extend")[1]

        def write(params: Any, cache: Any, token: jax.Array, positions: jax.Array) -> Any:
            return decode(applied(params), cache, token, positions, _NEW_CHUNK, _most_likely)

        return (
            MeshFunction(layout, compile_as(empty, out_shardings=shardings)),
            MeshFunction(layout, compile_as(read, out_shardings=shardings, donate_argnums=1)),
            MeshFunction(layout, compile_as(write, out_shardings=(layout.replicated, shardings), donate_argnums=1)),
        )

    def _cache_shardings(self, length: int) -> Any:
        """Caches split along the batch only."""
        split = self._layout.rows.spec[0]
        axes = batch_axes(self._model, nn.meta.unbox(abstract_params(self._model)), length)
        return jax.tree.map(lambda axis: NamedSharding(self._layout.mesh, PartitionSpec(*[None] * axis, split)), axes)


def batch_axes(model: LanguageModel, params: Any, length: int) -> Any:
    """Which axis of each array of a cache is that of rows, which depends on the family."""

    def shapes_of(rows: int) -> Any:
        return jax.eval_shape(
            lambda params: model.apply({"params": params}, rows, length, method="empty_cache"), params
        )

    def axis_of(small: Any, large: Any) -> int:
        return next(i for i, sizes in enumerate(zip(small.shape, large.shape, strict=True)) if sizes == (1, 2))

    return jax.tree.map(axis_of, shapes_of(1), shapes_of(2))


def _most_likely(logits_BV: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
