"""Greedy decoding of many prompts, in chunks of tokens, so that decoding ends soon after the last text is complete."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lmtrain.models.interface import LanguageModel
from lmtrain.models.params import abstract_params, cast
from lmtrain.sharding.mesh import Layout
from lmtrain.sharding.within import Within

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
        most_new: int,
        cache_length: int,
        is_complete: Callable[[int, list[int]], bool],
        between: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """The most likely tokens after each prompt, at most `most_new`.

        The number of prompts is a multiple of the layout's batch shards; prompts have at least one token, and fit into
        `cache_length` positions with the new tokens.
        `is_complete(row, new tokens)` is asked after every few tokens whether a row needs no more; more may come back.
        `between` is called after every few tokens, equally often in all processes.
        """
        rows, lengths = len(prompts), np.array([len(prompt) for prompt in prompts], np.int32)
        empty, read, write = self._programs(rows, cache_length)
        chunk = min(_PROMPT_CHUNK, cache_length)
        given = np.zeros((rows, cache_length), np.int32)
        for row, prompt in enumerate(prompts):
            given[row, : len(prompt)] = prompt
        cache = empty(params)
        # what comes after a prompt is overwritten before any query sees it
        for at in range(0, int(lengths.max()) - 1, chunk):
            at = min(at, cache_length - chunk)
            cache = read(params, cache, given[:, at : at + chunk], np.int32(at))
        token, places, columns = given[np.arange(rows), lengths - 1], lengths - 1, []
        new: list[list[int]] = [[] for _ in range(rows)]
        left = set(range(rows))
        while left:
            tokens, cache = write(params, cache, token, places)
            columns.append(np.asarray(tokens))
            token, places = columns[-1][:, -1], places + _NEW_CHUNK
            between()
            written = np.concatenate(columns, axis=1)
            for row in sorted(left):
                new[row] = written[row, :most_new].tolist()
                if len(new[row]) == most_new or is_complete(row, new[row]):
                    left.remove(row)
        return new

    def _build(self, rows: int, length: int) -> tuple[Within, Within, Within]:
        """Programs for an empty cache, for tokens of the prompts, and for new tokens."""
        layout = self._layout
        shardings = self._cache_shardings(length)
        compile_as = functools.partial(jax.jit, compiler_options=self._options)

        def apply(params: Any, *arguments: Any, method: str) -> Any:
            return self._model.apply({"params": cast(params, self._dtype)}, *arguments, method=method)

        def empty(params: Any) -> Any:
            return apply(params, rows, length, method="empty_cache")

        def read(params: Any, cache: Any, tokens: jax.Array, start: jax.Array) -> Any:
            return apply(params, tokens, cache, start, method="extend")[1]

        def write(params: Any, cache: Any, token: jax.Array, places: jax.Array) -> Any:
            def one(carry: Any, index: jax.Array) -> tuple[Any, jax.Array]:
                token, cache = carry
                logits, cache = apply(params, token[:, None], cache, places + index, method="extend")
                token = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
                return (token, cache), token

            (_, cache), tokens = jax.lax.scan(one, (token, cache), jnp.arange(_NEW_CHUNK))
            return tokens.T, cache

        return (
            Within(layout, compile_as(empty, out_shardings=shardings)),
            Within(layout, compile_as(read, out_shardings=shardings, donate_argnums=1)),
            Within(layout, compile_as(write, out_shardings=(layout.replicated, shardings), donate_argnums=1)),
        )

    def _cache_shardings(self, length: int) -> Any:
        """Caches split along the batch only; which axis that is depends on the family."""
        one, two = (jax.eval_shape(functools.partial(self._empty, rows, length)) for rows in (1, 2))
        batch = self._layout.batch.spec[0]

        def place(small: Any, large: Any) -> NamedSharding:
            axis = next(i for i, sizes in enumerate(zip(small.shape, large.shape, strict=True)) if sizes == (1, 2))
            return NamedSharding(self._layout.mesh, PartitionSpec(*[None] * axis, batch))

        return jax.tree.map(place, one, two)

    def _empty(self, rows: int, length: int) -> Any:
        params = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nn.meta.unbox(abstract_params(self._model))
        )
        return self._model.apply({"params": params}, rows, length, method="empty_cache")
