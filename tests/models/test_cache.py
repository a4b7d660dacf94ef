"""Caches of keys and values: what a layer keeps, and that queries see the same keys as without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import quick
from models.families import window_model

from lmtrain.models.attention.attend import attend
from lmtrain.models.cache import KvCache, StackCache
from lmtrain.models.mixer import AttentionMixer

LENGTH, WINDOW = 12, 4
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(2, heads, LENGTH, 3)).astype(np.float32) for heads in (4, 2, 2))
WINDOWS = (None, WINDOW, WINDOW, None, 50)  # the last one is longer than the sequence


MIXERS = tuple(AttentionMixer(hidden_dim=12, heads=4, kv_heads=2, head_width=3, window=window) for window in WINDOWS)


def empty():
    return StackCache.empty(MIXERS, 2, LENGTH, jnp.float32)


def extend(cache, k, v, layer, *more):
    kind, number = cache.find(MIXERS[layer], jnp.int32(layer))
    state, keys = KvCache(**cache.states[kind]).extend(k, v, number, WINDOWS[layer], *more)
    return cache.with_state(kind, {"k": state.k, "v": state.v}), keys


def test_a_layer_with_a_window_keeps_only_the_positions_in_it():
    shapes = [state["k"].shape for state in empty().states]
    assert shapes == [(2, 2, 2, 12, 3), (2, 2, 2, 4, 3), (1, 2, 2, 12, 3)]


@pytest.mark.parametrize("layer", range(5))
@pytest.mark.parametrize("ends", [[1, 2, 3, 4, 5, 6, 7], [3, 9, 10, 12], [12], [7, 12]])
def test_queries_in_parts_see_the_keys_of_a_whole_sequence(layer, ends):
    window = WINDOWS[layer]
    expected = jax.jit(functools.partial(attend, window=window))(Q, K, V, 0.5)
    cache, parts, start = empty(), [], 0
    for end in ends:
        cache, keys = extend(cache, K[:, :, start:end], V[:, :, start:end], layer, jnp.int32(start))
        parts.append(attend(Q[:, :, start:end], keys.k, keys.v, 0.5, start, window=window, key_at=keys.at))
        start = end
    np.testing.assert_allclose(np.concatenate(parts, axis=2), expected[:, :, :start], rtol=1e-5, atol=1e-5)
    others = [jnp.abs(state["k"]).sum((1, 2, 3, 4)) > 0 for state in cache.states]
    assert sum(int(layers.sum()) for layers in others) == 1


def test_rows_of_different_lengths_with_padding():
    """Padding does not enter the cache of a window, and the last token may be read again."""
    lengths = np.array([9, 3])
    expected = jax.jit(functools.partial(attend, window=WINDOW))(Q, K, V, 0.5)
    padded = [np.where(np.arange(10)[:, None] < lengths[:, None, None, None], x[:, :, :10], 99) for x in (K, V)]
    cache, _ = extend(empty(), *padded, 1, 0, lengths)
    for start in (lengths - 1, lengths, lengths + 1):
        rows = np.arange(2)
        q, k, v = (x[rows, :, start][:, :, None] for x in (Q, K, V))
        cache, keys = extend(cache, k, v, 1, jnp.asarray(start))
        found = attend(q, keys.k, keys.v, 0.5, jnp.asarray(start), window=WINDOW, key_at=keys.at)
        np.testing.assert_allclose(found[:, :, 0], expected[rows, :, start], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_layers", [2, 7])
def test_a_model_with_windows_gives_the_logits_of_the_full_sequence(num_layers):
    """In chunks of which some rows have nothing, some only a part."""
    model = window_model(num_layers)
    params, lengths = quick.random_params(model), np.array([11, 6, 2])
    tokens = RNG.integers(0, 13, (3, LENGTH)).astype(np.int32)
    whole = jax.jit(model.apply)({"params": params}, tokens)
    extended = jax.jit(lambda *given: model.apply({"params": params}, *given, method="extend"))
    cache = model.apply({"params": params}, 3, LENGTH, method="empty_cache")
    assert {state["k"].shape[3] for state in cache.states} == ({3} if num_layers == 2 else {3, 12})
    for at in (0, 5):
        _, cache = extended(tokens[:, at : at + 5], cache, jnp.int32(at), jnp.clip(lengths - 1 - at, 0, 5))
    for more in range(3):
        position = np.minimum(lengths - 1 + more, LENGTH - 1)
        logits, cache = extended(tokens[np.arange(3), position][:, None], cache, jnp.asarray(position))
        np.testing.assert_allclose(logits[:, 0], whole[np.arange(3), position], rtol=1e-4, atol=1e-4)
