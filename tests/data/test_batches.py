"""Batches from a real cache."""

import re
import threading
from dataclasses import replace

import numpy as np
import pytest
from cache_building import open_built

from lmtrain.data.batches import EvalSource, TrainSource, iterate
from lmtrain.data.config import BatchSizes, DataConfig
from lmtrain.data.mixture import Mixture
from lmtrain.data.windows import WindowOrder
from lmtrain.runtime.errors import ReadError, UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    from conftest import TOKENIZER, VALIDATION_FILES

    config = DataConfig(
        train_urls=VALIDATION_FILES, tokenizer=str(TOKENIZER), cache_dir=str(tmp_path_factory.mktemp("cache"))
    )
    return open_built(config)


def source_of(*stores, rows=(0, 1, 2, 3), separate=True, **changes):
    settings = {"mixture": None, "seq_len": 16, "batch_sizes": BatchSizes.of(4), "rows": {4: np.array(rows)}}
    settings |= {"num_steps": 30, "shuffle": False, "seed": 5, "mask_across_documents": separate}
    return TrainSource(stores=stores, **settings | changes)


def evaluation_of(store, batch_size=4, separate=True, **changes):
    settings = {"seq_len": 16, "rows": np.arange(batch_size), "max_batches": None, "mask_across_documents": separate}
    return EvalSource(store=store, batch_size=batch_size, **settings | changes)


@pytest.mark.parametrize("separate", [False, True])
def test_parts_of_the_columns_are_parts_of_the_batch(store, separate):
    """Cuts fall anywhere, also where a document starts."""
    sources = (source_of(store, separate=separate), evaluation_of(store, separate=separate, reset_positions=True))
    for source in sources:
        for cut in range(17):
            parts = [replace(source, columns=columns) for columns in (range(cut), range(cut, 16)) if columns]
            for step in (0, 7, len(source) - 1):
                whole, found = source[step], [part[step] for part in parts]
                for name, array in whole.items():
                    np.testing.assert_array_equal(np.concatenate([part[name] for part in found], axis=1), array)


def test_loss_weights_of_a_source_apply_to_all_its_tokens(store):
    """Each row is from one source; both stores have the same tokens, so only the weights differ."""
    mixture = Mixture([(0, (0.5, 0.5))], seed=1)
    weighted = source_of(store, store, mixture=mixture, loss_weights=[2.0, 0.25])
    for step in range(5):
        batch = weighted[step]
        sources, _ = mixture.source_of(np.int64(step * 4) + np.arange(4))
        assert batch["loss_weights"].dtype == np.float32
        np.testing.assert_array_equal(batch["loss_weights"], np.where(sources[:, None] == 0, 2.0, 0.25) * np.ones(16))
    assert "loss_weights" not in source_of(store, store, mixture=mixture)[0]


def test_training_windows_are_the_text_in_order(store):
    batches = [source_of(store)[step] for step in range(3)]
    expected, _, _ = store.read(np.array([0]), 3 * 4 * 16)
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in batches]).ravel(), expected[0])
    for batch in batches:  # every row has one target fewer than tokens
        assert batch["loss_mask"].tolist() == [[True] * 15 + [False]] * 4


def test_segments_are_where_the_documents_of_each_row_start(store):
    batches = [source_of(store)[step] for step in range(30)]
    tokens, segments = (np.concatenate([batch[name] for batch in batches]) for name in ("tokens", "segments"))
    ends = tokens == 0  # the end-of-text token, the last of every document
    begins = np.pad(ends, ((0, 0), (1, 0)))[:, :-1]
    expected = np.maximum.accumulate(np.where(begins, np.arange(16), 0), axis=1)
    np.testing.assert_array_equal(segments, expected)
    assert expected.max() > 0
    assert "segments" not in source_of(store, separate=False)[1]


@pytest.mark.parametrize("separate", [True, False])
def test_positions_restart_at_each_document_of_a_row(store, separate):
    source = replace(source_of(store, separate=separate), reset_positions=True)
    evaluation = evaluation_of(store, separate=separate, reset_positions=True)
    begins = 0
    for batch in (read[index] for read in (source, evaluation) for index in range(30)):
        assert ("segments" in batch) is separate
        expected = np.zeros((4, 16), np.int32)
        for row, tokens in enumerate(batch["tokens"]):
            for at in range(1, 16):
                expected[row, at] = 0 if tokens[at - 1] == 0 else expected[row, at - 1] + 1
        begins += (expected[:, 1:] == 0).sum()
        np.testing.assert_array_equal(batch["positions"], expected)
        assert batch["positions"].dtype == np.int32
    assert begins > 2
    assert "positions" not in source_of(store)[3]


def test_evaluation_has_every_token_but_the_first_as_a_target_once(store):
    source = evaluation_of(store, 7)
    targets = [
        np.roll(batch["tokens"], -1, axis=1)[batch["loss_mask"]]
        for batch in map(source.__getitem__, range(len(source)))
    ]
    everything, _, _ = store.read(np.array([0]), store.shards.tokens)
    np.testing.assert_array_equal(np.concatenate(targets), everything[0, 1:])
    assert len(evaluation_of(store, 7, max_batches=2)) == 2


@pytest.mark.parametrize("shuffle", [False, True, 7])
def test_starting_later_gives_the_same_batches(store, shuffle):
    source = source_of(store, shuffle=shuffle)
    later = list(iterate(source, 26))
    assert len(later) == 4
    for step, batch in enumerate(later, start=26):
        assert batch["tokens"].tobytes() == source[step]["tokens"].tobytes()
        assert batch["loss_mask"].tobytes() == source[step]["loss_mask"].tobytes()


def test_processes_share_a_batch_without_changing_it(store):
    whole = source_of(store, shuffle=True)[9]["tokens"]
    parts = [source_of(store, rows=rows, shuffle=True)[9]["tokens"] for rows in ([0, 3], [1, 2])]
    np.testing.assert_array_equal(np.concatenate(parts), whole[[0, 3, 1, 2]])


@pytest.mark.parametrize("shuffle", [False, True, 7])
@pytest.mark.parametrize("mixed", [False, True])
def test_phases_of_batch_sizes_cut_the_same_sequence_of_examples_differently(store, shuffle, mixed):
    stores, mixture = [store], None
    if mixed:
        stores, mixture = [store, _Reversed(store)], Mixture([(0, (1.0, 3.0))], seed=5)

    def phases(sizes, num_steps: int):
        sizes = BatchSizes.of(sizes)
        settings = {"rows": {size: np.arange(size) for size in sizes.all}, "num_steps": num_steps, "shuffle": shuffle}
        return replace(source_of(*stores, mixture=mixture), batch_sizes=sizes, **settings)

    def read(sizes, num_steps: int):
        source = phases(sizes, num_steps)
        batches = [source[step] for step in range(num_steps)]
        return batches, {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    # 3 steps of 2 and 6 of 4 are 30 sequences
    batches, phased = read([(0, 2), (3, 4)], 9)
    assert [len(batch["tokens"]) for batch in batches] == [2, 2, 2, 4, 4, 4, 4, 4, 4]
    for size in (1, 3, 10):
        _, constant = read(size, 30 // size)
        for name in ("tokens", "loss_mask", "segments"):
            np.testing.assert_array_equal(phased[name], constant[name])
    # a resume within the second phase reads the same batches
    for step, batch in enumerate(iterate(phases([(0, 2), (3, 4)], 9), 2), start=2):
        np.testing.assert_array_equal(batch["tokens"], batches[step]["tokens"])


@pytest.mark.parametrize(
    ("error", "starts"),
    [(MemoryError(), True), (OSError(5, "Input/output error"), True), (RuntimeError("can't start new thread"), False)],
)
def test_a_reader_thread_that_fails_is_an_error_that_names_the_data_and_the_cause(store, monkeypatch, error, starts):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(*((store, "_read_blocks") if starts else (threading.Thread, "start")), fail)
    with pytest.raises(ReadError, match=f"{re.escape(store.name)} .*{type(error).__name__ if starts else ''}"):
        next(iterate(source_of(store)))


@pytest.mark.parametrize("error", [RuntimeError("a mistake in the code"), UserError("a corrupt shard")])
def test_other_errors_of_a_reader_thread_are_raised_as_they_are(store, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(store, "_read_blocks", fail)
    with pytest.raises(type(error), match=str(error)):
        next(iterate(source_of(store)))


def test_less_than_one_sequence_is_a_user_error(store):
    source = source_of(store, seq_len=10**6)
    with pytest.raises(UserError, match=r"1,000,000 \(model.seq_len\)"):
        source[0]


def test_a_mixture_reads_each_example_from_its_source(store):
    mixture = Mixture([(0, (1.0, 3.0))], seed=5)
    stores = store, _Reversed(store)
    source, alone = source_of(*stores, mixture=mixture), [source_of(one) for one in stores]
    for step in range(6):
        sources, numbers = mixture.source_of(np.arange(4 * step, 4 * step + 4))
        for tokens, which, number in zip(source[step]["tokens"], sources, numbers, strict=True):
            np.testing.assert_array_equal(tokens, alone[which][number // 4]["tokens"][number % 4])


def test_the_seeds_of_the_sources_never_change(store):
    """Other seeds would change the data of every running mixed run that shuffles."""
    source = source_of(store, store, store, mixture=Mixture([(0, (1.0, 1.0, 1.0))], seed=5), shuffle=True)
    examples = np.arange(20)
    for number, order in enumerate(source.orders):
        expected = WindowOrder(True, 5 + number * 4294967296)(examples, 1000)
        np.testing.assert_array_equal(order(examples, 1000), expected)
    assert len(source.orders) == 3


class _Reversed:
    """A store with the same tokens in reverse order."""

    has_targets = has_pairs = False

    def __init__(self, store):
        self.shards = store.shards
        self._all = store.read(np.array([0]), store.shards.tokens)[0][0][::-1]

    def read(self, starts, length):
        tokens = np.stack([self._all[start : start + length] for start in starts])
        return tokens, np.zeros(tokens.shape, bool), np.ones(tokens.shape, bool)
