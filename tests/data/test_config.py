"""Settings of the data: one kind of source with compatible settings, and batch sizes in phases."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lmtrain.data.config import BatchSizes, DataConfig

MIX = {"configs": {"a": {"id": "x"}, "b": {"train_urls": ["y"]}}}


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"demo": "d"},
        {"train_urls": ["a"], "validation_urls": ["b"]},
        {"id": "x", "name": "y", "stream": True},
        MIX,
        MIX | {"train_weights": {"a": 0.5, "b": 1}},
        MIX | {"train_weights": [[0, {"a": 1}], [100, {"b": 1}]]},
    ],
)
def test_every_kind_of_source_reads_back_what_it_writes(data):
    config = DataConfig(**data)
    assert DataConfig(**config.model_dump(mode="json")) == config


def test_the_demo_sets_files_and_a_tokenizer_unless_one_is_set():
    config = DataConfig(demo="some/where/")
    assert config.tokenizer == "some/where/tokenizer"
    assert config.urls("train") == ["some/where/train.{1..8}-of-8.jsonl.gz"]
    assert config.urls("validation") == ["some/where/validation.jsonl.gz"]
    assert DataConfig(demo="d", tokenizer="mine").tokenizer == "mine"


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        ({"demo": "d", "id": "x"}, "demo", "id"),
        ({"demo": "d", "validation_urls": ["a"]}, "demo", "validation_urls"),
        (MIX | {"train_urls": ["a"]}, "configs", "train_urls"),
        (MIX | {"demo": "d"}, "demo", "configs"),
        ({"id": "x", "train_urls": ["a"]}, "id", "train_urls"),
        ({"name": "x"}, "name", "id"),
        ({"stream": True}, "stream", "id"),
        ({"configs": {"a": {"name": "x"}}}, "name", "id"),
        ({"train_weights": {"a": 1}}, "train_weights", "source 'a'"),
        (MIX | {"train_weights": {"c": 1}}, "train_weights", "source 'c'"),
    ],
)
def test_incompatible_sources_are_refused_with_the_setting(data, field, message):
    with pytest.raises(ValidationError, match=message) as refused:
        DataConfig(**data)
    assert [error["ctx"]["field"] for error in refused.value.errors()] == [field]


@pytest.mark.parametrize("setting", ["demo", "configs", "id", "name", "train_urls", "train_weights"])
def test_null_turns_a_source_off(setting):
    config = DataConfig(**{"validation_urls": ["v"], setting: None})
    assert config.urls("validation") == ["v"]


STEPS = [[5], [], [0, 9, 5], [0, 9, 9], [-1, 0]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, "source 'b'"),
        ({"a": 0, "b": 0}, "all weights are 0"),
        ([[0, {"c": 1}]], "source 'c'"),
        *(([[step, {"a": 1}] for step in steps], re.escape(f"{steps}")) for steps in STEPS),
        (True, "expected a number|valid"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**MIX, train_weights=weights)


def test_batches_have_positions_if_documents_have_targets_unless_it_is_set():
    chat = {"train_urls": ["a.jsonl"], "format": {"type": "chat"}}
    assert not DataConfig(train_urls=["a.jsonl"]).has_positions
    assert DataConfig(**chat).has_positions
    assert DataConfig(train_urls=["a.jsonl"], reset_positions=True).has_positions
    assert not DataConfig(**chat, reset_positions=False).has_positions


# phases that start at step 0, then at random gaps
PHASES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4).map(
    lambda pairs: [(sum(gap for gap, _ in pairs[:number]), size) for number, (_, size) in enumerate(pairs)]
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(PHASES, st.integers(0, 30), st.integers(0, 90), st.integers(0, 10**12))
def test_results_match_the_naive_count_and_steps_and_sequences_are_inverse(phases, few, sequences, step):
    """N steps are filled by exactly the sequences before step N, and not by one fewer."""
    sizes, at = BatchSizes.of(phases), lambda step: [size for start, size in phases if start <= step][-1]
    before = [sum(map(at, range(number))) for number in range(92)]
    assert (sizes.at(few), sizes.before(few)) == (at(few), before[few])
    assert sizes.whole_steps(sequences) == max(number for number in range(92) if before[number] <= sequences)
    assert sizes.whole_steps(sizes.before(step)) == step
    assert sizes.before(step + 1) == sizes.before(step) + sizes.at(step)
    if step:
        assert sizes.whole_steps(sizes.before(step) - 1) == step - 1
