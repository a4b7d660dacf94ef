"""The window of each row of each batch."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from lmtrain.data import windows
from lmtrain.data.cache_manifest import ShardInfo, Shards
from lmtrain.data.token_store import TokenStore
from lmtrain.data.windows import TextWindows, WindowOrder, train_windows, wait_for_windows


def of(shards, overlap=0):
    """Windows of 10 tokens of a store that is never read."""
    return TextWindows(TokenStore("text", shards, "<u2", lambda info: info.file), 10, overlap)


@pytest.mark.parametrize(
    ("tokens", "train", "evaluation"),
    # windows of evaluation share a token, and a tail of one token has nothing to predict
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (9, 0, 1), (10, 1, 1), (11, 1, 2), (12, 1, 2), (19, 1, 2), (20, 2, 3)],
)
def test_training_drops_the_tail_and_evaluation_keeps_a_tail_with_a_target(tokens, train, evaluation):
    shards = Shards()
    shards.add(ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=tokens, documents=1))
    assert (of(shards).for_training(), of(shards, overlap=1).for_evaluation()) == (train, evaluation)


def test_without_shuffle_windows_are_in_order_and_restart():
    assert train_windows(np.arange(9), 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("shuffle", [True, 3, 4, 7, 10, 50])
def test_a_shuffled_epoch_has_every_window_once_in_a_new_order(shuffle):
    epochs = train_windows(np.arange(30), 10, shuffle, seed=7).reshape(3, 10).tolist()
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_number_shuffles_within_blocks_of_that_size():
    epochs = train_windows(np.arange(20), 10, 4, seed=1).reshape(2, 10)
    for epoch in epochs.tolist():
        assert [sorted(epoch[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    blocks = train_windows(np.arange(4000), 4000, 400, seed=1).reshape(10, 400) % 400
    assert len({tuple(block) for block in blocks.tolist()}) == 10


@pytest.mark.parametrize("shuffle", [False, True, 64])
def test_windows_do_not_depend_on_other_requested_examples(shuffle):
    whole = train_windows(np.arange(88, 96), 1000, shuffle, seed=3)
    parts = [
        train_windows(np.array(examples), 1000, shuffle, seed=3) for examples in ([88, 89, 90], [91], [92, 93, 94, 95])
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_the_order_follows_the_seed():
    orders = {tuple(train_windows(np.arange(50), 50, True, seed=seed).tolist()) for seed in range(20)}
    assert len(orders) == 20


@pytest.mark.parametrize("shuffle", [False, True, 7, 5000])
def test_orders_requested_in_parts_equal_one_request(shuffle, monkeypatch):
    monkeypatch.setattr(windows, "_BLOCK", 64)
    rng = np.random.default_rng(0)
    order = WindowOrder(shuffle, 3)
    for count in (1, 50, 333):
        for _ in range(20):
            examples = np.sort(rng.integers(0, 1000, 9))
            np.testing.assert_array_equal(order(examples, count), train_windows(examples, count, shuffle, 3))


@pytest.mark.parametrize("shuffle", [False, 4])
def test_the_order_while_the_cache_grows_is_that_of_the_finished_cache(shuffle):
    """Windows of 10 tokens; the cache ends at 95 tokens, and grows by 5."""
    finished, growing = Shards(), Shards()
    finished.add(ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=95, documents=1))
    finished.finish()
    with ThreadPoolExecutor(1) as pool:
        for first in range(0, 30, 2):  # into the fourth epoch
            examples = np.array([first, first + 1])
            asked = pool.submit(wait_for_windows, of(growing), examples, shuffle)
            while not asked.done() and not growing.complete:
                growing.add(ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=5, documents=1))
                time.sleep(0.002)
                if growing.tokens == 95:
                    growing.finish()
            now, then = asked.result(10), wait_for_windows(of(finished), examples, shuffle)
            expected = train_windows(examples, then, shuffle, 1)
            np.testing.assert_array_equal(train_windows(examples, now, shuffle, 1), expected)
            if first == 0:
                assert growing.tokens < 60  # it did not wait for the complete cache


def test_a_full_shuffle_waits_for_everything():
    growing = Shards()
    growing.add(ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=95, documents=1))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(wait_for_windows, of(growing), np.array([0]), True)
        time.sleep(0.05)
        assert not asked.done()
        growing.finish()
        assert asked.result(10) == 9
