"""Sampling for several requests at once, which come and go: each has a row of one KV cache, all rows advance together.

    engine = Engine(model, params, seq_len, rows=4)
    request = engine.add(Request(ids=ids, settings=SamplingSettings(64), seed=1))
    while engine.step():
        ...                                  # request.new grows; request.reason says why it has ended

A prompt is read in parts into a cache of its own, with a step of the other rows after each, and then takes a free row.
What a row has of an earlier conversation with the same beginning is not read again.
"""

import functools
import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lmtrain.generation.decode import SamplingSettings, batch_axes
from lmtrain.models.interface import LanguageModel
from lmtrain.runtime.errors import UserError

# Tokens of a prompt that are read at once.
_CHUNK = 64
# The most likely tokens, among which a request with `top_k` or `top_p` usually chooses: sorting all is slow.
_MOST_LIKELY = 256


@dataclass(eq=False, kw_only=True)
class Request:
    """A text to continue. `ends` are the tokens after which it ends, which are not part of it.

    `new` are the tokens so far; `reason` is None until it has ended: after one of `ends` (stop), after
    `max_new_tokens` or at the end of the context (length), or because it was cancelled. `cached` is the number of
    prompt tokens that its row had from an earlier request.
    """

    ids: Sequence[int]
    settings: SamplingSettings
    seed: int = 0
    ends: Collection[int | None] = ()
    new: list[int] = field(default_factory=list)
    cached: int = 0
    reason: Literal["stop", "length", "cancelled"] | None = None


class Engine:
    """See above. `seq_len` is the model's context: prompt and new tokens together fit into it.

    Raises `UserError` for caches that do not fit into memory.
    """

    def __init__(self, model: LanguageModel, params: Any, seq_len: int, rows: int):
        self.seq_len = seq_len
        self._params = params
        self._forgets = model.forgets
        self._waiting: deque[Request] = deque()
        self._requests: list[Request | None] = [None] * rows
        self._cached: list[list[int]] = [[] for _ in range(rows)]  # tokens that each row of the cache has
        axes = batch_axes(model, params, seq_len)

        def apply(params: Any) -> Any:
            return functools.partial(model.apply, {"params": params})

        def read(params: Any, cache: Any, tokens: Any, start: Any, last: Any, *sampling: Any) -> Any:
            count = None if tokens.shape[1] == 1 else last + 1
            logits, cache = apply(params)(tokens, cache, start, count, method="extend")
            return choose_each(logits[:, last], start + last, *sampling), cache

        def write(params: Any, cache: Any, tokens: Any, starts: Any, *sampling: Any) -> Any:
            logits, cache = apply(params)(tokens[:, None], cache, starts, method="extend")
            return choose_each(logits[:, 0], starts, *sampling), cache

        def take(cache: Any, row: Any) -> Any:
            return jax.tree.map(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, row, 1, axis), cache, axes)

        def put(cache: Any, own: Any, row: Any) -> Any:
            return jax.tree.map(
                lambda x, part, axis: jax.lax.dynamic_update_slice_in_dim(x, part, row, axis), cache, own, axes
            )

        self._read, self._write = jax.jit(read, donate_argnums=1), jax.jit(write, donate_argnums=1)
        self._take, self._put = jax.jit(take), jax.jit(put, donate_argnums=0)
        try:
            self._cache = jax.jit(lambda params: apply(params)(rows, seq_len, method="empty_cache"))(params)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            advice = "lower --parallel" if rows > 1 else "use a device with more memory"
            raise UserError(
                f"KV caches of {rows:,} x {seq_len:,} tokens do not fit into the device's memory; {advice}"
            ) from None

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or has a row."""
        return bool(self._waiting or any(self._requests))

    def add(self, request: Request) -> Request:
        """Let a request wait for a row. Its prompt has at least one token, and leaves room for one. Another thread than
        that of `step` may call this and `cancel`."""
        assert 0 < len(request.ids) < self.seq_len
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request."""
        if request.reason is None:
            request.reason = "cancelled"

    def step(self) -> bool:
        """One more token for every request that has a row, after new ones have got theirs; False if there is none."""
        while self._waiting and (free := [row for row, own in enumerate(self._requests) if own is None]):
            request = self._waiting.popleft()
            if request.reason is None:
                self._start(request, free)
        self._advance()
        return self.is_busy

    def _start(self, request: Request, free: Sequence[int]) -> None:
        """Read a prompt, of which the row keeps what it has; the first token comes with it."""
        ids = list(request.ids)
        row = max(free, key=lambda row: self._reusable(self._cached[row], ids))
        at, own = self._reusable(self._cached[row], ids), self._take(self._cache, row)
        request.cached = at
        token: Any = None
        while at < len(ids):
            # padding is written behind the last token, which there must be room for
            size = _CHUNK if len(ids) - at > 1 and at + _CHUNK <= self.seq_len else 1
            part = ids[at : at + size]
            padded = np.array([part + [0] * (size - len(part))], np.int32)
            sampling = _sampling([request])
            token, own = self._read(self._params, own, padded, at, len(part) - 1, *sampling)
            at += len(part)
            if at < len(ids):
                self._advance()
        self._cache, self._cached[row] = self._put(self._cache, own, row), ids
        self._requests[row] = request
        self._take_token(row, int(token[0]))

    def _reusable(self, cached: Sequence[int], ids: Sequence[int]) -> int:
        """How many of these tokens a row has; the last one is always read."""
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(cached, ids, strict=False)))
        same = min(same, len(ids) - 1)
        return 0 if self._forgets and same < len(cached) - 1 else same  # the cache has forgotten what came before

    def _advance(self) -> None:
        """One more token for every request that has a row."""
        for row, request in enumerate(self._requests):
            if request is not None and request.reason is not None:
                self._requests[row] = None  # cancelled
        active = [row for row, request in enumerate(self._requests) if request is not None]
        if not active:
            return
        tokens, starts = np.zeros((2, len(self._requests)), np.int32)
        for row in active:
            request = self._requests[row]
            assert request is not None
            tokens[row], starts[row] = request.new[-1], len(request.ids) + len(request.new) - 1
            self._cached[row].append(request.new[-1])
        for row in set(range(len(tokens))) - set(active):  # read what they have again: its place is not overwritten
            cached = self._cached[row]
            tokens[row], starts[row] = (cached[-1], len(cached) - 1) if cached else (0, 0)
        chosen, self._cache = self._write(self._params, self._cache, tokens, starts, *_sampling(self._requests))
        chosen = np.asarray(chosen)
        for row in active:
            self._take_token(row, int(chosen[row]))

    def _take_token(self, row: int, token: int) -> None:
        request = self._requests[row]
        assert request is not None
        if request.reason is None and token in request.ends:
            request.reason = "stop"
        elif request.reason is None:
            request.new.append(token)
            room = min(request.settings.max_new_tokens, self.seq_len - len(request.ids))
            if len(request.new) >= room:
                request.reason = "length"
        if request.reason is not None:
            self._requests[row] = None


def _sampling(requests: Sequence[Request | None]) -> tuple[np.ndarray, ...]:
    """Seeds and settings by row: uint32 [B], temperature [B], top_k [B], top_p [B]."""
    settings = [SamplingSettings(1, temperature=0) if own is None else own.settings for own in requests]
    return (
        np.array([0 if own is None else own.seed % 2**32 for own in requests], np.uint32),
        np.array([each.temperature for each in settings], np.float32),
        np.array([each.top_k for each in settings], np.int32),
        np.array([each.top_p for each in settings], np.float32),
    )


def choose_each(
    logits_BV: jax.Array, positions: Any, seeds_B: jax.Array, temperature_B: Any, top_k_B: Any, top_p_B: Any
) -> jax.Array:
    """The next token of each row, int32 [B], by its own settings; see `SamplingSettings`.

    A token depends on its row's logits, settings and seed, and on the position of the token before it.
    """
    rows, vocab_size = logits_BV.shape
    positions_B = jnp.broadcast_to(positions, rows)
    keys_B = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seeds_B, positions_B)
    scaled_BV = logits_BV / jnp.maximum(temperature_B, 1e-6)[:, None]
    limits_B = jnp.where(top_k_B == 0, vocab_size, jnp.minimum(top_k_B, vocab_size))

    def among(count: int) -> jax.Array:
        """Of the `count` most likely tokens."""
        best_BK, ids_BK = jax.lax.top_k(scaled_BV, count)  # descending
        best_BK = jnp.where(jnp.arange(count) < limits_B[:, None], best_BK, -jnp.inf)
        shares_BK = jax.nn.softmax(best_BK)
        best_BK = jnp.where(jnp.cumsum(shares_BK, axis=1) - shares_BK < top_p_B[:, None], best_BK, -jnp.inf)
        places_B = jax.vmap(jax.random.categorical)(keys_B, best_BK)
        return jnp.take_along_axis(ids_BK, places_B[:, None], axis=1)[:, 0]

    is_cut_B = (limits_B < vocab_size) | (top_p_B < 1)
    needed = jnp.where(is_cut_B, limits_B, 0).max()
    few = min(_MOST_LIKELY, vocab_size)
    cut_B = jax.lax.cond(needed > few, lambda: among(vocab_size), lambda: among(few))
    free_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BV)
    sampled_B = jnp.where(is_cut_B, cut_B, free_B)
    return jnp.where(temperature_B == 0, jnp.argmax(logits_BV, axis=1), sampled_B).astype(jnp.int32)
