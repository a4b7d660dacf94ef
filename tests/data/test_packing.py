"""Packing of documents with targets: no document is split, and windows depend on the lengths only."""

import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.data.batches import EvalSource, TrainSource
from lmtrain.data.cache_manifest import ShardInfo, Shards
from lmtrain.data.config import BatchSizes
from lmtrain.data.windows import PackedWindows, pack, wait_for_windows

LENGTHS = st.lists(st.integers(1, 30), max_size=60)


@given(LENGTHS, st.integers(2, 20), st.sampled_from(["cut", "drop"]))
def test_windows_hold_complete_documents_in_order_and_the_next_one_does_not_fit(lengths, seq_len, too_long):
    found, sizes, first, num_long = pack(np.array(lengths, np.int64), seq_len, too_long)
    starts = np.cumsum([0, *lengths]).tolist()
    expected, window = [], []

    def close():
        if window:
            expected.append((starts[window[0]], sum(lengths[number] for number in window)))
        window.clear()

    for number, length in enumerate(lengths):
        if length > seq_len:
            close()
            expected.extend([(starts[number], seq_len)] * (too_long == "cut"))
            continue
        if sum(lengths[other] for other in window) + length > seq_len:
            close()
        window.append(number)
    close()
    assert list(zip(found.tolist(), sizes.tolist(), strict=True)) == expected
    assert [starts[number] for number in first] == found.tolist()
    assert num_long == sum(length > seq_len for length in lengths)


class Documents:
    """A store of documents with targets, in memory: token t of document d is 100 d + t, and odd ones are targets."""

    has_targets, has_pairs = True, False

    def __init__(self, *shards, too_long="cut", complete=True):
        self.name, self.too_long = "documents", too_long
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

    def read(self, starts, length):
        padded = np.append(self._tokens, np.zeros(length + 100, np.int32))
        tokens = np.array([padded[start : start + length] for start in starts.tolist()])
        return tokens.copy(), (tokens % 100 == 0) & (np.arange(length) > 0), tokens % 2 == 1


def source(store, steps=4, **settings):
    keywords = {"mask_across_documents": True, "reset_positions": None} | settings
    return TrainSource(
        stores=[store],
        mixture=None,
        seq_len=8,
        batch_sizes=BatchSizes.of(2),
        rows={2: np.arange(2)},
        num_steps=steps,
        shuffle=False,
        seed=0,
        **keywords,
    )


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


def test_parts_of_the_columns_are_parts_of_the_batch():
    whole = source(Documents([3, 4, 2, 1], [9, 8, 1, 1, 6], [20]))
    for cut in range(1, 8):
        parts = [replace(whole, columns=columns) for columns in (range(cut), range(cut, 8))]
        for step in range(4):
            for name, array in whole[step].items():
                found = np.concatenate([part[step][name] for part in parts], axis=1)
                np.testing.assert_array_equal(found, array, err_msg=f"{name} {cut} {step}")


def test_dropped_documents_are_in_no_window():
    batch = source(Documents([3, 9, 4], too_long="drop"))[0]
    assert batch["tokens"][:, 0].tolist() == [0, 200]


def test_evaluation_reads_every_window_once_and_pads_the_last_batch():
    store = Documents([3, 4, 2], [9, 8])
    whole = EvalSource(
        store=store,
        seq_len=8,
        batch_size=3,
        rows=np.arange(3),
        max_batches=None,
        mask_across_documents=True,
        reset_positions=None,
    )
    assert len(whole) == 2
    assert [whole[0]["tokens"][:, 0].tolist(), whole[1]["tokens"][:, 0].tolist()] == [[0, 200, 300], [400, 0, 0]]
    assert whole[1]["loss_mask"].any(axis=1).tolist() == [True, False, False]


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
