"""The window of each row of each batch: of text, of packed documents, and of pairs of answers."""

import itertools
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data import windows
from lmtrain.data.batches import EvalSource, TrainSource
from lmtrain.data.cache_manifest import ShardInfo, Shards
from lmtrain.data.config import BatchSizes
from lmtrain.data.token_store import TokenStore
from lmtrain.data.windows import (
    PackedWindows,
    PairWindows,
    TextWindows,
    WindowOrder,
    train_windows,
    wait_for_windows,
)


def with_tokens(count):
    shards = Shards()
    shards.add(ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=count, documents=1))
    return shards


def of(shards, overlap=0):
    """Windows of 10 tokens of a store that is never read."""
    return TextWindows(TokenStore("text", shards, "<u2", lambda info: info.file), 10, overlap)


@pytest.mark.parametrize(
    ("tokens", "train", "evaluation"),
    # windows of evaluation share a token, and a tail of one token has nothing to predict
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (9, 0, 1), (10, 1, 1), (11, 1, 2), (12, 1, 2), (19, 1, 2), (20, 2, 3)],
)
def test_training_drops_the_tail_and_evaluation_keeps_a_tail_with_a_target(tokens, train, evaluation):
    shards = with_tokens(tokens)
    assert (of(shards).for_training(), of(shards, overlap=1).for_evaluation()) == (train, evaluation)


@pytest.mark.parametrize("shuffle", [True, 3, 4, 7, 10, 50])
def test_a_shuffled_epoch_has_every_window_once_in_a_new_order(shuffle):
    epochs = train_windows(np.arange(30), 10, shuffle, seed=7).reshape(3, 10).tolist()
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(train_windows(np.arange(50), 50, True, seed=seed).tolist()) for seed in range(20)}) == 20


def test_a_number_shuffles_within_blocks_of_that_size_and_false_keeps_the_order():
    assert train_windows(np.arange(9), 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    epochs = train_windows(np.arange(20), 10, 4, seed=1).reshape(2, 10)
    for epoch in epochs.tolist():
        assert [sorted(epoch[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    blocks = train_windows(np.arange(4000), 4000, 400, seed=1).reshape(10, 400) % 400
    assert len({tuple(block) for block in blocks.tolist()}) == 10


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
    finished, growing = with_tokens(95), Shards()
    finished.finish()
    with ThreadPoolExecutor(1) as pool:
        for first in range(0, 30, 2):  # into the fourth epoch
            examples = np.array([first, first + 1])
            asked = pool.submit(wait_for_windows, of(growing), examples, shuffle)
            while not asked.done() and not growing.complete:
                growing.add(replace(finished.infos[0], tokens=5))
                time.sleep(0.002)
                if growing.tokens == 95:
                    growing.finish()
            now, then = asked.result(10), wait_for_windows(of(finished), examples, shuffle)
            expected = train_windows(examples, then, shuffle, 1)
            np.testing.assert_array_equal(train_windows(examples, now, shuffle, 1), expected)
            if first == 0:
                assert growing.tokens < 60  # it did not wait for the complete cache


def test_a_full_shuffle_waits_for_everything():
    growing = with_tokens(95)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(wait_for_windows, of(growing), np.array([0]), True)
        time.sleep(0.05)
        assert not asked.done()
        growing.finish()
        assert asked.result(10) == 9


LENGTHS = st.lists(st.integers(1, 30), max_size=60)
ANY_SPEED = settings(deadline=None, max_examples=60, derandomize=True)


class Documents:
    """A store of documents with targets, in memory: token t of document d is 100 d + t, and odd ones are targets."""

    has_targets, has_pairs = True, False

    def __init__(self, *shards, too_long="cut", pack="first_fit", complete=True):
        self.name, self.too_long, self.pack = "documents", too_long, pack
        self.shards = Shards()
        self._lengths = []
        self._tokens = np.zeros(0, np.int32)
        for lengths in shards:
            self.add(lengths)
        if complete:
            self.shards.finish()

    def add(self, lengths):
        first = sum(map(len, self._lengths))
        self._lengths.append(np.array(lengths, np.int64))
        new = [100 * (first + number) + place for number, length in enumerate(lengths) for place in range(length)]
        self._tokens = np.append(self._tokens, np.array(new, np.int32))
        self.shards.add(
            ShardInfo(file="f", source={}, bytes=1, sha256="", tokens=len(new), documents=len(lengths), targets=0)
        )

    def document_lengths(self, shard):
        return self._lengths[shard]

    def read_spans(self, spans, shape):
        tokens, begins, targets = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
        for row, column, start, count in spans:
            place = row, slice(column, column + count)
            tokens[place] = own = self._tokens[start : start + count]
            begins[place], targets[place] = (own % 100 == 0) & (np.arange(count) > 0), own % 2 == 1
        return tokens, begins, targets


def source(store, steps=4, **settings):
    keywords = {"mask_across_documents": True, "reset_positions": None, "mixture": None, "seq_len": 8} | settings
    keywords |= {"batch_sizes": BatchSizes.of(2), "rows": {2: np.arange(2)}, "shuffle": False, "seed": 0}
    return TrainSource(stores=[store], num_steps=steps, **keywords)


def evaluation(store, size, **settings):
    keywords = {"mask_across_documents": True, "reset_positions": None, "max_batches": None, "seq_len": 8}
    return EvalSource(store=store, batch_size=size, rows=np.arange(size), **keywords, **settings)


def test_a_position_is_trained_if_the_next_token_is_a_target_of_the_same_document():
    batch = source(Documents([3, 4, 2], [9, 8]))[0]
    assert batch["tokens"].tolist() == [[0, 1, 2, 100, 101, 102, 103, 0], [200, 201, 0, 0, 0, 0, 0, 0]]
    assert batch["loss_mask"].astype(int).tolist() == [[1, 0, 0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["segments"].tolist() == [[0, 0, 0, 3, 3, 3, 3, 7], [0, 0, 2, 2, 2, 2, 2, 2]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert "positions" not in source(Documents([3]), reset_positions=False)[0]
    following = source(Documents([3, 4, 2], [9, 8]))[1]
    assert following["tokens"].tolist() == [list(range(300, 308)), list(range(400, 408))]
    assert following["segments"].max() == 0


@ANY_SPEED
@given(st.lists(LENGTHS.filter(bool), min_size=1, max_size=3), st.integers(2, 20))
def test_windows_have_a_target_if_their_loss_mask_has_one(shards, seq_len):
    windows = PackedWindows(Documents(*shards), seq_len)
    for number in range(windows.for_training()):
        numbers = np.array([number])
        assert windows.have_target(numbers) == windows.read(numbers, range(8))[2].any()


def test_looking_for_a_target_takes_no_memory_for_the_rest_of_a_long_sequence():
    windows = PackedWindows(Documents([1, 4]), 2**24)
    windows.for_training()
    tracemalloc.start()
    assert windows.have_target(np.arange(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_evaluation_reads_every_window_once_and_pads_the_last_batch():
    store = Documents([3, 4, 2], [9, 8])
    whole = evaluation(store, 3)
    assert len(whole) == 2
    assert [whole[0]["tokens"][:, 0].tolist(), whole[1]["tokens"][:, 0].tolist()] == [[0, 200, 300], [400, 0, 0]]
    assert whole[1]["loss_mask"].any(axis=1).tolist() == [True, False, False]
    assert source(Documents([3, 9, 4], too_long="drop"))[0]["tokens"][:, 0].tolist() == [0, 200]


@pytest.mark.parametrize("shuffle", [False, 3])
def test_a_growing_cache_gives_the_windows_of_the_complete_one(shuffle):
    shards = [[3, 4, 2], [9, 8], [5, 5, 5], [1]]
    complete = PackedWindows(Documents(*shards), 8)
    count = complete.for_training()
    growing = Documents(complete=False)
    windows = PackedWindows(growing, 8)
    found = []

    def read():
        for number in range(count):
            waited = wait_for_windows(windows, np.array([number]), shuffle)
            assert waited > number
            found.append(windows.read(np.array([number]), range(8))[0].tolist())

    reader = threading.Thread(target=read)
    reader.start()
    for lengths in shards:
        growing.add(lengths)
    growing.shards.finish()
    reader.join(30)
    assert found == [complete.read(np.array([number]), range(8))[0].tolist() for number in range(count)]


class Pairs(Documents):
    """A store of pairs; see `Documents`."""

    has_pairs = True


def test_pairs_stay_together_and_have_their_numbers():
    batch = source(Pairs([3, 2, 2, 1], [3, 3]), references=[np.arange(1, 7, dtype=np.float32)])[0]
    assert batch["tokens"].tolist() == [[0, 1, 2, 100, 101, 200, 201, 300], [400, 401, 402, 500, 501, 502, 0, 0]]
    assert batch["documents"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 3], [0, 0, 0, 1, 1, 1, 2, 2]]
    assert batch["segments"].tolist() == [[0, 0, 0, 3, 3, 5, 5, 7], [0, 0, 0, 3, 3, 3, 6, 6]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 0], [0, 1, 2, 0, 1, 2, 0, 1]]
    assert batch["loss_mask"].astype(int).tolist() == [[1, 0, 0, 1, 0, 1, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0]]
    assert batch["reference"].tolist() == [[1, 0, 0, 2, 0, 3, 0, 4], [5, 0, 0, 6, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("lengths", "tokens", "documents"),
    [
        ([9, 2], [0, 1, 2, 3, 4, 5, 100, 101], [0, 0, 0, 0, 0, 0, 1, 1]),
        ([2, 9], [0, 1, 100, 101, 102, 103, 104, 105], [0, 0, 1, 1, 1, 1, 1, 1]),
        ([9, 9], [0, 1, 2, 3, 100, 101, 102, 103], [0, 0, 0, 0, 1, 1, 1, 1]),
    ],
)
def test_a_pair_that_is_too_long_keeps_the_start_of_both_answers(lengths, tokens, documents):
    store = Pairs([*lengths, 1, 2], [2, 2])
    batch = source(store, references=[np.arange(1, 7, dtype=np.float32)])[0]
    assert batch["tokens"][0].tolist() == tokens
    assert batch["documents"][0].tolist() == documents
    second = documents.index(1)
    assert batch["segments"][0].tolist() == [second * number for number in documents]
    assert np.flatnonzero(batch["reference"][0]).tolist() == [0, second]
    mask = [token % 2 == 1 and token % 100 > 0 for token in tokens[1:]] + [False]
    assert batch["loss_mask"][0].tolist() == mask
    assert batch["tokens"][1].tolist() == [200, 300, 301, 0, 0, 0, 0, 0]
    assert PairWindows(store, 8).for_training() == 3
    dropped = Pairs([*lengths, 1, 2], [2, 2], too_long="drop")
    batch = source(dropped, references=[np.arange(1, 7, dtype=np.float32)])[0]
    assert batch["tokens"][:, 0].tolist() == [200, 400]
    assert batch["reference"][0].tolist() == [3, 4, 0, 0, 0, 0, 0, 0]


@ANY_SPEED
@given(st.lists(LENGTHS.filter(lambda lengths: len(lengths) > 1), min_size=1, max_size=3), st.integers(1, 7))
def test_parts_of_the_columns_are_parts_of_the_batch_of_documents_and_of_pairs(shards, cut):
    shards = [lengths[: len(lengths) // 2 * 2] for lengths in shards]
    references = [np.arange(1, 1 + sum(map(len, shards)), dtype=np.float32)]
    for pack, of_pairs in itertools.product(("first_fit", "best_fit"), (True, False)):
        kind, more = (Pairs, {"references": references}) if of_pairs else (Documents, {})
        whole = source(kind(*shards, pack=pack), **more)
        parts = [replace(whole, columns=columns) for columns in (range(cut), range(cut, 8))]
        for name, array in whole[0].items():
            found = np.concatenate([part[0][name] for part in parts], axis=1)
            np.testing.assert_array_equal(found, array, err_msg=name)


@pytest.mark.parametrize("kind", [Documents, Pairs])
def test_best_fit_reads_documents_from_anywhere_in_a_shard(kind):
    lengths = [3, 4, 5, 2, 1, 9, 4, 4]
    references = [np.arange(1, 9, dtype=np.float32)] if kind is Pairs else None
    batch = source(kind(lengths, pack="best_fit"), references=references)
    first = {name: array[0].tolist() for name, array in batch[0].items()}
    if kind is Documents:
        assert first["tokens"] == [0, 1, 2, 200, 201, 202, 203, 204]
        assert first["segments"] == [0, 0, 0, 3, 3, 3, 3, 3]
        assert first["loss_mask"] == [True, False, False, True, False, True, False, False]
        assert batch[1]["tokens"].tolist() == [[300, 301, 400, 700, 701, 702, 703, 0], list(range(500, 508))]
    else:
        assert first["tokens"] == [0, 1, 2, 100, 101, 102, 103, 0]
        assert batch[1]["tokens"][0].tolist() == [400, 500, 501, 502, 503, 504, 505, 506]
        assert batch[1]["reference"][0].tolist() == [5, 6, 0, 0, 0, 0, 0, 0]


def test_padding_is_the_rest_of_the_sequences():
    for pack, share in (("first_fit", 1 - 20 / 32), ("best_fit", 1 - 20 / 24)):
        assert PackedWindows(Documents([3, 7, 5], [5], pack=pack), 8).padding == pytest.approx(share)
    assert PackedWindows(Documents(), 8).padding == 0


def test_evaluation_has_the_values_of_each_document_once():
    store = Pairs([3, 2, 2, 1], [3, 9, 1, 1])
    whole = evaluation(store, 2, reference=np.arange(1, 9, dtype=np.float32))
    values = np.concatenate([whole[index]["reference"].ravel() for index in range(len(whole))])
    assert values[values > 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not whole[1]["loss_mask"][1].any()
    windows = whole.windows
    assert [windows.documents_of(window).tolist() for window in range(4)] == [[0, 1, 2, 3], [4, 5], [6, 7], []]
