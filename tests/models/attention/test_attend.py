"""Causal attention against plain numpy, and kernels whose queries are a part of the sequence."""

import functools
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.models.attention import attend as formula
from lmtrain.models.attention import kernel
from lmtrain.models.attention.attend import Options, alibi_slopes
from lmtrain.models.attention.kernel import kernel_of

RNG = np.random.default_rng(0)


def attend(q, k, v, *scale_and_first, **how):
    return jax.jit(lambda q, k, v: formula.attend(q, k, v, *scale_and_first, **how))(q, k, v)


def self_attend(q, k, v, scale, **how):
    return jax.jit(lambda q, k, v: kernel.self_attend("xla", q, k, v, scale, **how))(q, k, v)


def arrays(queries: int, keys: int):
    shapes = [(2, 3, queries, 4), (2, 3, keys, 4), (2, 3, keys, 4)]
    return [RNG.normal(size=shape).astype(np.float32) for shape in shapes]


def plain(q, k, v, scale: float, first: int = 0, slopes=None, sinks=None) -> np.ndarray:
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for s in range(q.shape[2]):
        seen = slice(0, first + s + 1)
        scores = np.einsum("bhc,bhtc->bht", q[:, :, s], k[:, :, seen]) * scale
        if slopes is not None:
            scores += np.multiply.outer(slopes, np.arange(first + s + 1) - (first + s))
        weights = np.exp(scores)
        weights /= weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks)[:, None])
        out[:, :, s] = np.einsum("bht,bhtc->bhc", weights, v[:, :, seen])
    return out


@pytest.mark.parametrize(("length", "repeats"), [(1, 1), (2, 1), (7, 3), (129, 3), (130, 1)])
def test_self_attention_equals_the_formula_at_even_and_odd_lengths_also_with_wide_values(length, repeats):
    q, k, v = arrays(length, length)
    v = np.concatenate([v - number for number in range(repeats)], axis=3)
    np.testing.assert_allclose(self_attend(q, k, v, 0.3), plain(q, k, v, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [5, 140])
def test_a_sink_is_one_more_score_of_a_value_of_0(length):
    q, k, v = arrays(length, length)
    sinks = np.float32([-2.0, 0.5, 3.0])
    expected = plain(q, k, v, 0.3, sinks=sinks)
    np.testing.assert_allclose(self_attend(q, k, v, 0.3, sinks=sinks), expected, rtol=1e-5, atol=1e-5)
    with_key = [np.concatenate([x, np.zeros((2, 3, 1, 4), np.float32)], 2) for x in (k, v)]
    at = np.append(np.arange(length), 0)  # a key of zeros has the score 0
    found = attend(q, *with_key, 0.3, key_at=at)
    np.testing.assert_allclose(found, attend(q, k, v, 0.3, sinks=np.zeros(3, np.float32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "queries"), [(0, 6), (2, 3), (5, 1)])
def test_queries_at_a_later_position_see_the_keys_up_to_their_own(first, queries):
    q, k, v = arrays(queries, 6)
    np.testing.assert_allclose(attend(q, k, v, 0.5, first), plain(q, k, v, 0.5, first), rtol=1e-5, atol=1e-5)


def test_later_keys_and_values_have_no_influence():
    q, k, v = arrays(140, 140)
    before = np.asarray(self_attend(q, k, v, 0.5))
    k[:, :, 94:], v[:, :, 94:] = 1e6, -1e6  # huge scores give no NaN either
    np.testing.assert_array_equal(np.asarray(self_attend(q, k, v, 0.5))[:, :, :94], before[:, :, :94])


def test_upcast_computes_bfloat16_scores_in_float32():
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays(8, 8))
    wide = [np.asarray(x, np.float32) for x in (q, k, v)]
    exact = plain(*wide, 3.0)
    rounding = {"xla_allow_excess_precision": False}  # otherwise the compiler keeps scores in float32 where possible
    upcast, narrow = (
        np.asarray(jax.jit(functools.partial(formula.attend, upcast=wanted), compiler_options=rounding)(q, k, v, 3.0))
        for wanted in (True, False)
    )
    assert np.abs(upcast - exact).max() < 0.03
    assert np.abs(upcast - exact).mean() < 0.9 * np.abs(narrow - exact).mean()


def test_drop_is_applied_to_the_weights_of_every_query():
    q, k, v = arrays(5, 5)
    np.testing.assert_allclose(
        self_attend(q, k, v, 0.5, drop=lambda weights: 2 * weights),
        2 * plain(q, k, v, 0.5),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("length", [1, 5, 130, 131])
def test_segments_are_separate_sequences(length):
    q, k, v = arrays(length, length)
    cuts = [0, (length + 1) // 3, length]
    segments = np.repeat([4, 9], np.diff(cuts))[None].repeat(2, axis=0)
    found = np.asarray(self_attend(q, k, v, 0.5, segments=jnp.asarray(segments)))
    for start, end in pairwise(cuts):
        part = slice(start, end)
        expected = plain(q[:, :, part], k[:, :, part], v[:, :, part], 0.5)
        np.testing.assert_allclose(found[:, :, part], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [8, 130])
def test_a_window_hides_earlier_keys(length):
    q, k, v = arrays(length, length)
    found = np.asarray(self_attend(q, k, v, 0.5, window=3))
    for s in range(length):
        seen = slice(max(0, s - 2), s + 1)
        expected = plain(q[:, :, s : s + 1], k[:, :, seen], v[:, :, seen], 0.5, first=length)
        np.testing.assert_allclose(found[:, :, s : s + 1], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("length", [1, 5, 130])
def test_grouped_query_heads_share_keys_and_values(kv_heads, length):
    rng = np.random.default_rng(5)
    q = rng.normal(size=(2, 6, length, 4)).astype(np.float32)
    k, v = (rng.normal(size=(2, kv_heads, length, 4)).astype(np.float32) for _ in range(2))
    segments = np.sort(rng.integers(0, 2, (2, length)), axis=1)
    repeated = [np.repeat(part, 6 // kv_heads, axis=1) for part in (k, v)]
    found = self_attend(q, k, v, 0.5, segments=jnp.asarray(segments), window=4)
    expected = self_attend(q, *repeated, 0.5, segments=jnp.asarray(segments), window=4)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "queries"), [(0, 130), (3, 127), (129, 1)])
def test_alibi_lowers_scores_by_the_slope_times_the_distance(first, queries):
    q, k, v = arrays(queries, 130)
    slopes = np.array([0.7, 0.2, 0.05], np.float32)
    expected = plain(q, k, v, 0.5, first, slopes)
    found = attend(q, k, v, 0.5, first, slopes=slopes)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    if first == 0:
        halves = self_attend(q, k, v, 0.5, slopes=slopes)
        np.testing.assert_allclose(halves, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected - plain(q, k, v, 0.5, first)).max() > 0.1


def test_alibi_with_grouped_heads_gives_every_query_head_its_own_slope():
    rng = np.random.default_rng(5)
    q = rng.normal(size=(2, 6, 7, 4)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2, 7, 4)).astype(np.float32) for _ in range(2))
    slopes = alibi_slopes(6, 8.0)
    found = self_attend(q, k, v, 0.5, slopes=slopes)
    expected = plain(q, np.repeat(k, 3, axis=1), np.repeat(v, 3, axis=1), 0.5, slopes=slopes)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "bias_max", "powers"),
    [
        (1, 8, [8]),
        (4, 8, [2, 4, 6, 8]),
        (6, 8, [2, 4, 6, 8, 1, 3]),  # of 8 heads: every second one, then those in between
        (12, 8, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),  # of 16 heads
        (4, 16, [4, 8, 12, 16]),
    ],
)
def test_slopes_are_powers_of_two_in_the_published_order(heads, bias_max, powers):
    slopes = alibi_slopes(heads, bias_max)
    np.testing.assert_allclose(slopes, [2.0**-power for power in powers], rtol=1e-6)
    assert slopes.dtype == np.float32


@pytest.mark.parametrize("backend", ["xla", "blockwise"])
def test_capped_scores(backend):
    q, k, v = arrays(7, 7)
    scores = np.einsum("bhsc,bhtc->bhst", np.float64(q), np.float64(k)) * 0.9
    scores = np.where(np.tri(7, dtype=bool), 1.5 * np.tanh(scores / 1.5), -np.inf)
    weights = np.exp(scores)
    expected = np.einsum("bhst,bhtc->bhsc", weights / weights.sum(-1, keepdims=True), v)
    found = jax.jit(lambda q, k, v: kernel.self_attend(backend, q, k, v, 0.9, cap=1.5))(q, k, v)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_keys_at_given_positions_equal_keys_in_order():
    """As in a cache that keeps the last keys only: any order, other positions for each row, empty places."""
    q, k, v = arrays(2, 6)
    order = np.array([[4, 2, 0, 5, 1, 3], [3, 5, 4, 0, 2, 1]])
    rows = np.arange(2)[:, None]
    for window in (None, 3):
        expected = attend(q, k, v, 0.5, 4, window=window)
        shuffled = (x[rows, :, order].transpose(0, 2, 1, 3) for x in (k, v))
        found = attend(q, *shuffled, 0.5, jnp.array([4, 4]), window=window, key_at=jnp.asarray(order))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    without = attend(q, k[:, :, 2:], v[:, :, 2:], 0.5, 4, key_at=jnp.arange(2, 6))
    empty = attend(q, k, v, 0.5, 4, key_at=jnp.array([-1, -2, 2, 3, 4, 5]))
    np.testing.assert_allclose(empty, without, rtol=1e-5, atol=1e-5)


LENGTH, SIZE = 192, 48


def long_arrays():
    rng = np.random.default_rng(0)
    q, k, v, d = (jnp.asarray(rng.normal(size=(2, heads, LENGTH, 16)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = jnp.asarray(np.sort(rng.integers(0, 4, (2, LENGTH)), axis=1), jnp.int32)
    return q, k, v, d[:, :, :SIZE], segments


@pytest.mark.parametrize(("first", "window"), [(40, None), (LENGTH - SIZE, 30)])
@pytest.mark.parametrize("name", ["xla", "blockwise", "triton"])
def test_a_part_of_the_queries_gives_that_part_of_the_result(name, first, window):
    assert "part" in kernel_of(name).features
    q, k, v, d, segments = long_arrays()
    slopes = alibi_slopes(4, 8)

    def part(q, k, v, first):
        options = Options(segments=segments, window=window, slopes=slopes, first_query=first, block_size=32)
        return kernel_of(name).call(q[:, :, :SIZE], k, v, 0.25, options)

    def whole(q, k, v):
        both = (segments, segments)
        mixed = formula.attend(q, k, v, 0.25, segments=both, window=window, slopes=slopes)
        return mixed[:, :, first : first + SIZE]

    expected, pull = jax.vjp(whole, q, k, v)
    moved = jnp.roll(q, -first, axis=2)
    # the position is only known when the program runs
    found, pull_part = jax.jit(lambda *x: jax.vjp(lambda q, k, v: part(q, k, v, x[3]), *x[:3]))(
        moved, k, v, jnp.int32(first)
    )
    np.testing.assert_allclose(found, expected, atol=2e-5)
    d_q, d_k, d_v = pull(d)
    for ours, theirs in zip(pull_part(d), (jnp.roll(d_q, -first, axis=2), d_k, d_v), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
