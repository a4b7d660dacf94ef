"""Windows of pairs of answers: pairs stay together, long ones keep the start of both answers."""

from dataclasses import replace

import numpy as np
import pytest
from data.test_packing import LENGTHS, Documents, source
from hypothesis import given
from hypothesis import strategies as st

from lmtrain.data.batches import EvalSource
from lmtrain.data.windows import PairWindows, kept_lengths


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


@given(st.integers(1, 30), st.integers(1, 30), st.integers(2, 20))
def test_the_longer_answer_is_cut_off_first(chosen, rejected, seq_len):
    kept = [int(part) for part in kept_lengths(np.int64(chosen), np.int64(rejected), seq_len)]
    if chosen + rejected <= seq_len:
        assert kept == [chosen, rejected]
        return
    assert sum(kept) == seq_len
    half = seq_len // 2
    assert kept[0] == min(chosen, seq_len - half) or kept[1] == rejected
    assert kept[1] == min(rejected, half) or kept[0] == chosen


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


@given(st.lists(LENGTHS.filter(lambda lengths: len(lengths) > 1), min_size=1, max_size=3), st.integers(1, 7))
def test_parts_of_the_columns_are_parts_of_the_batch(shards, cut):
    shards = [lengths[: len(lengths) // 2 * 2] for lengths in shards]
    references = [np.arange(1, 1 + sum(map(len, shards)), dtype=np.float32)]
    whole = source(Pairs(*shards), references=references)
    parts = [replace(whole, columns=columns) for columns in (range(cut), range(cut, 8))]
    for name, array in whole[0].items():
        found = np.concatenate([part[0][name] for part in parts], axis=1)
        np.testing.assert_array_equal(found, array, err_msg=name)


def test_evaluation_has_the_values_of_each_document_once():
    store = Pairs([3, 2, 2, 1], [3, 9, 1, 1])
    whole = EvalSource(
        store=store,
        seq_len=8,
        batch_size=2,
        rows=np.arange(2),
        max_batches=None,
        mask_across_documents=True,
        reset_positions=None,
        reference=np.arange(1, 9, dtype=np.float32),
    )
    values = np.concatenate([whole[index]["reference"].ravel() for index in range(len(whole))])
    assert values[values > 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not whole[1]["loss_mask"][1].any()
    windows = whole.windows
    covered = [windows.range_of(window) for window in range(4)]
    assert [(part.start, part.stop) for part in covered] == [(0, 4), (4, 6), (6, 8), (0, 0)]
