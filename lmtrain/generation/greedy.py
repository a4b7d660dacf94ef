"""Greedy decoding of many prompts, in chunks of tokens, so that decoding ends soon after the last text is complete."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.generation.decode import decode
from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, cast_to_compute
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.mesh_function import MeshFunction

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
        """Caches split along the batch only; which axis that is depends on the family."""
        model, params = self._model, nn.meta.unbox(abstract_params(self._model))

        def shapes_of(rows: int) -> Any:
            return jax.eval_shape(
                lambda params: model.apply({"params": params}, rows, length, method="empty_cache"), params
            )

        def place(small: Any, large: Any) -> NamedSharding:
            axis = next(i for i, sizes in enumerate(zip(small.shape, large.shape, strict=True)) if sizes == (1, 2))
            return NamedSharding(self._layout.mesh, PartitionSpec(*[None] * axis, self._layout.rows.spec[0]))

        return jax.tree.map(place, shapes_of(1), shapes_of(2))


def _most_likely(logits_BV: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
