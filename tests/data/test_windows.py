"""Which window each row of each batch is."""

import numpy as np
import pytest

from lmtrain.data.permutation import permute
from lmtrain.data.windows import num_eval_windows, num_train_windows, train_windows


def test_training_drops_the_tail_and_evaluation_keeps_what_has_a_target():
    assert [num_train_windows(tokens, 4) for tokens in (3, 4, 7, 8)] == [0, 1, 1, 2]
    # a tail of one token has nothing to predict
    assert [num_eval_windows(tokens, 4) for tokens in (0, 1, 2, 4, 5, 6, 8)] == [0, 0, 1, 1, 1, 2, 2]


def test_in_order_examples_follow_one_another_and_start_again():
    assert train_windows(np.arange(9), 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("shuffle", [True, 3, 4, 7, 10, 50])
def test_shuffled_every_epoch_has_every_window_once_in_another_order(shuffle):
    epochs = train_windows(np.arange(30), 10, shuffle, seed=7).reshape(3, 10).tolist()
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_number_shuffles_within_stretches_of_so_many():
    epochs = train_windows(np.arange(20), 10, 4, seed=1).reshape(2, 10)
    for epoch in epochs.tolist():
        assert [sorted(epoch[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    stretches = train_windows(np.arange(4000), 4000, 400, seed=1).reshape(10, 400) % 400
    assert len({tuple(stretch) for stretch in stretches.tolist()}) == 10


@pytest.mark.parametrize("shuffle", [False, True, 64])
def test_windows_do_not_depend_on_what_else_is_asked_for(shuffle):
    whole = train_windows(np.arange(88, 96), 1000, shuffle, seed=3)
    parts = [
        train_windows(np.array(examples), 1000, shuffle, seed=3) for examples in ([88, 89, 90], [91], [92, 93, 94, 95])
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_the_order_follows_the_seed():
    orders = {tuple(train_windows(np.arange(50), 50, True, seed=seed).tolist()) for seed in range(20)}
    assert len(orders) == 20


def test_permutation_is_one_for_every_size():
    for n in (1, 2, 3, 4, 5, 17, 64, 65, 1000):
        for seed in (0, 2**63 - 1):
            order = permute(np.arange(n), n, seed, np.zeros(n, np.int64))
            assert sorted(order.tolist()) == list(range(n))


def test_permutation_is_the_same_for_ever():
    """Another order here would change the data of every run that is under way."""
    assert permute(np.arange(10), 10, 1, np.ones(10, np.int64)).tolist() == [3, 1, 7, 0, 9, 4, 2, 8, 6, 5]


def test_permutation_scatters_neighbours():
    order = permute(np.arange(50_000), 50_000, 0, np.zeros(50_000, np.int64))
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(50_000))[0, 1]) < 0.02
