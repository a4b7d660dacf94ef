"""The keyed permutation of 0 .. n-1."""

import numpy as np

from lmtrain.data.mixture import permute


def test_every_size_is_permuted():
    for n in (1, 2, 3, 4, 5, 17, 64, 65, 1000):
        for seed in (0, 2**63 - 1):
            order = permute(np.arange(n), n, seed, np.zeros(n, np.int64))
            assert sorted(order.tolist()) == list(range(n))


def test_the_order_never_changes():
    """Another order would change the data of every running run."""
    assert permute(np.arange(10), 10, 1, np.ones(10, np.int64)).tolist() == [3, 1, 7, 0, 9, 4, 2, 8, 6, 5]


def test_neighbours_are_scattered():
    order = permute(np.arange(50_000), 50_000, 0, np.zeros(50_000, np.int64))
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(50_000))[0, 1]) < 0.02
