"""Which window each row of each batch is."""

import numpy as np

from lmtrain.data.permutation import permute
from lmtrain.data.windows import num_eval_windows, num_train_windows, train_window


def test_training_drops_the_tail_and_evaluation_keeps_what_has_a_target():
    assert [num_train_windows(tokens, 4) for tokens in (3, 4, 7, 8)] == [0, 1, 1, 2]
    # a tail of one token has nothing to predict
    assert [num_eval_windows(tokens, 4) for tokens in (0, 1, 2, 4, 5, 6, 8)] == [0, 0, 1, 1, 1, 2, 2]


def test_in_order_batches_follow_one_another_and_start_again():
    rows = np.arange(3)
    assert [train_window(step, rows, 3, 4).tolist() for step in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def test_shuffled_every_epoch_has_every_window_once_in_another_order():
    batches = [train_window(step, np.arange(5), 5, 10, shuffle_seed=7) for step in range(6)]
    epochs = [np.concatenate(batches[start : start + 2]).tolist() for start in (0, 2, 4)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_epoch_may_end_inside_a_batch():
    windows = np.concatenate([train_window(step, np.arange(4), 4, 6, shuffle_seed=1) for step in range(3)])
    assert sorted(windows[:6]) == list(range(6))
    assert sorted(windows[6:]) == list(range(6))


def test_rows_do_not_depend_on_who_asks_for_them():
    whole = train_window(11, np.arange(8), 8, 1000, shuffle_seed=3)
    parts = [train_window(11, np.array(rows), 8, 1000, shuffle_seed=3) for rows in ([0, 1, 2], [3], [4, 5, 6, 7])]
    assert np.concatenate(parts).tolist() == whole.tolist()


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
