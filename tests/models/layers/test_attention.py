"""Causal attention against plain numpy, one query at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.layers.attention import attend, self_attend


def draw(queries, keys, batch=2, heads=3, dim=4, seed=0):
    random = np.random.default_rng(seed)
    return [random.normal(size=(batch, heads, n, dim)).astype(np.float32) for n in (queries, keys, keys)]


def by_hand(q, k, v, scale, first=0, keep=None):
    """Query s attends to keys 0 .. first + s; `keep` [S, T] multiplies the weights."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.empty_like(q)
    for s in range(q.shape[2]):
        end = min(first + s + 1, k.shape[2])
        scores = np.einsum("bhc,bhtc->bht", q[:, :, s], k[:, :, :end]) * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        if keep is not None:
            weights = weights * keep[s, :end]
        out[:, :, s] = np.einsum("bht,bhtc->bhc", weights, v[:, :, :end])
    return out


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8])
def test_self_attention_is_the_plain_formula_for_odd_and_even_lengths(length):
    q, k, v = draw(length, length)
    np.testing.assert_allclose(self_attend(q, k, v, 0.5), by_hand(q, k, v, 0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 8])
def test_two_halves_are_the_same_as_one_piece(length):
    q, k, v = draw(length, length)
    np.testing.assert_allclose(self_attend(q, k, v, 0.5), attend(q, k, v, 0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys", "first"), [(1, 6, 0), (1, 6, 5), (2, 6, 3), (3, 3, 0)])
def test_later_queries_see_keys_up_to_their_own_position(queries, keys, first):
    q, k, v = draw(queries, keys)
    np.testing.assert_allclose(attend(q, k, v, 0.5, first), by_hand(q, k, v, 0.5, first), rtol=1e-5, atol=1e-5)


def test_first_query_and_scale_may_be_traced():
    q, k, v = draw(2, 6)
    got = jax.jit(attend)(q, k, v, jnp.float32(0.7), jnp.int32(3))
    np.testing.assert_allclose(got, by_hand(q, k, v, 0.7, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changed", [3, 4, 6])
def test_nothing_leaks_from_the_future(changed):
    q, k, v = draw(7, 7)
    before = self_attend(q, k, v, 0.5)
    k[:, :, changed], v[:, :, changed] = 100.0, -100.0
    after = self_attend(q, k, v, 0.5)
    assert np.array_equal(before[:, :, :changed], after[:, :, :changed])
    assert not np.allclose(before[:, :, changed:], after[:, :, changed:])


def test_huge_scores_stay_finite_and_pick_the_largest():
    q = np.full((1, 1, 3, 1), 1e4, np.float32)
    k = np.array([0.0, 1e4, 5e3], np.float32).reshape(1, 1, 3, 1)
    v = np.array([1.0, 2.0, 3.0], np.float32).reshape(1, 1, 3, 1)
    assert np.array_equal(self_attend(q, k, v, 1.0).ravel(), [1.0, 2.0, 2.0])


@pytest.mark.parametrize("length", [6, 7])
def test_drop_acts_on_the_weights_after_the_softmax(length):
    keep = np.random.default_rng(1).integers(0, 2, (length, length)).astype(np.float32) * 2
    q, k, v = draw(length, length)

    def drop(weights):
        queries, keys = weights.shape[2:]
        first = length - queries if keys == length else 0
        return weights * keep[first : first + queries, :keys]

    got = self_attend(q, k, v, 0.5, drop=drop)
    np.testing.assert_allclose(got, by_hand(q, k, v, 0.5, keep=keep), rtol=1e-5, atol=1e-5)


def test_upcast_computes_bfloat16_scores_in_float32():
    q, k, v = (jnp.asarray(x * 4, jnp.bfloat16) for x in draw(33, 33, dim=64))
    exact = by_hand(q, k, v, 0.125)
    plain, upcast = self_attend(q, k, v, 0.125), self_attend(q, k, v, 0.125, upcast=True)
    assert plain.dtype == upcast.dtype == jnp.bfloat16

    def error(got):
        return np.abs(np.asarray(got, np.float64) - exact).mean()

    assert error(upcast) < 0.5 * error(plain)


def test_softmax_is_float32_when_inputs_are_bfloat16():
    # 1024 equal scores: weights 2^-10 are exact, and their sum in bfloat16 would stall at 256
    q = jnp.zeros((1, 1, 1, 1), jnp.bfloat16)
    k, v = jnp.zeros((1, 1, 1024, 1), jnp.bfloat16), jnp.ones((1, 1, 1024, 1), jnp.bfloat16)
    assert float(attend(q, k, v, 1.0, 1023)[0, 0, 0, 0]) == 1.0
