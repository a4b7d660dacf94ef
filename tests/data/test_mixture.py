"""Mixtures: exact shares, each source in order without gaps, and a stable example for each number."""

import numpy as np
import pytest

from lmtrain.data.mixture import BLOCK, Mixture, block_counts, permute
from lmtrain.runtime.errors import UserError


def given(mixture, examples):
    return mixture.source_of(np.arange(examples))


def assert_without_gaps(sources, numbers):
    for source in range(3):
        assert numbers[sources == source].tolist() == list(range((sources == source).sum()))


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((1,), [2048]),
        ((1, 1), [1024, 1024]),
        ((0.75, 0.25), [1536, 512]),
        ((3, 1), [1536, 512]),
        ((1, 1, 1), [683, 683, 682]),
        ((1, 0), [2048, 0]),
        ((0, 1), [0, 2048]),
        ((0.1, 0.2, 0.7), [205, 410, 1433]),
    ],
)
def test_a_block_has_the_shares_rounded_by_largest_remainder(weights, counts):
    assert block_counts(weights).tolist() == [counts]
    sources, _ = given(Mixture([(0, weights)], 1), 3 * BLOCK)
    for block in sources.reshape(3, BLOCK):
        assert np.bincount(block, minlength=len(weights)).tolist() == counts


SMALL = [(1e-4, 1), (1 / 4097, 2 / 4097, 1), (3e-4, 0.2, 0, 7e-4, 0.5), tuple(0.8**n for n in range(40))]


@pytest.mark.parametrize("weights", SMALL, ids=str)
def test_small_shares_are_exact_over_several_blocks(weights):
    """To 1 % over the cycle of blocks, and to a few examples after every block."""
    counts = block_counts(weights)
    shares = np.array(weights) / sum(weights)
    assert len(counts) > 1
    assert counts.min() >= 0
    assert (counts.sum(1) == BLOCK).all()
    np.testing.assert_allclose(counts.sum(0), shares * BLOCK * len(counts), rtol=0.01)
    behind = np.cumsum(counts, axis=0) - shares * BLOCK * np.arange(1, len(counts) + 1)[:, None]
    assert np.abs(behind / np.maximum(1, np.log2(len(counts)))).max() < 1
    for source in np.flatnonzero((shares > 0) & (shares < 1 / BLOCK)):
        assert counts[:, source].max() == 1


def test_a_share_too_small_for_any_example_is_refused():
    with pytest.raises(UserError, match=r"1e-09 .* 8,388,608 "):
        block_counts((1e-9, 1))


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (0.001, 0.3, 0.2)])
def test_every_source_is_taken_in_order_without_gaps(weights):
    sources, numbers = given(Mixture([(0, weights)], 3), 20 * BLOCK + 100)
    assert_without_gaps(sources, numbers)


def test_sources_are_spread_over_a_block_in_its_own_order():
    sources, _ = given(Mixture([(0, (1, 1))], 3), 2 * BLOCK)
    first, second = sources.reshape(2, BLOCK)
    assert abs(first[:200].mean() - 0.5) < 0.15
    assert (first != second).any()
    assert (given(Mixture([(0, (1, 1))], 4), BLOCK)[0] != first).any()


@pytest.mark.parametrize("change", [1, 100, BLOCK, BLOCK + 1, 5000])
def test_weights_change_at_their_step_and_sources_continue_without_gaps(change):
    mixture = Mixture([(0, (1, 0, 1)), (change, (0, 1, 3))], 3)
    sources, numbers = given(mixture, change + 3 * BLOCK)
    assert 1 not in sources[:change]
    assert 0 not in sources[change:]
    assert_without_gaps(sources, numbers)


def test_an_example_does_not_depend_on_the_order_of_requests():
    phases = [(0, (1, 2)), (3000, (2, 1))]
    index = np.random.default_rng(0).integers(0, 20_000, 500)
    whole = given(Mixture(phases, 9), 20_000)
    asked = Mixture(phases, 9).source_of(index)
    for all_of_them, some in zip(whole, asked, strict=True):
        assert some.tolist() == all_of_them[index].tolist()


def test_the_order_never_changes():
    """Another order would change the data of every running mixed run."""
    sources, numbers = Mixture([(0, (1, 2, 1))], 7).source_of(np.arange(2040, 2056))
    assert sources.tolist() == [1, 2, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0]
    assert permute(np.arange(10), 10, 1, np.ones(10, np.int64)).tolist() == [3, 1, 7, 0, 9, 4, 2, 8, 6, 5]
    assert numbers.tolist() == [1020, 511, 1021, 1022, 509, 1023, 510, 511, 1024, 1025, 512, 1026, 1027, 1028, 513, 514]


@pytest.mark.parametrize("limits", [(10, 10), (1000, 10_000), (10**6, 300), (0, 5)])
def test_examples_end_before_a_source_would_restart(limits):
    mixture = Mixture([(0, (1, 3)), (500, (3, 1))], 2)
    within = mixture.examples_within(limits, 20_000)
    sources, _ = given(mixture, 20_000)
    counts = [np.bincount(sources[:n], minlength=2) for n in (within, within + 1)]
    assert (counts[0] <= limits).all()
    assert within == 20_000 or (counts[1] > limits).any()


def test_every_size_is_permuted_and_neighbours_are_scattered():
    for n in (1, 2, 3, 4, 5, 17, 64, 65, 1000):
        for seed in (0, 2**63 - 1):
            order = permute(np.arange(n), n, seed, np.zeros(n, np.int64))
            assert sorted(order.tolist()) == list(range(n))
    order = permute(np.arange(50_000), 50_000, 0, np.zeros(50_000, np.int64))
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(50_000))[0, 1]) < 0.02
