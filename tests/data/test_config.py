"""Settings of the data: one kind of source with compatible settings."""

import pytest
from pydantic import ValidationError

from lmtrain.data.config import DataConfig, SourceConfig

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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"demo": "d", "id": "x"}, "set together with id; remove one"),
        ({"demo": "d", "validation_urls": ["a"]}, "set together with validation_urls"),
        (MIX | {"train_urls": ["a"]}, "set together with train_urls"),
        (MIX | {"demo": "d"}, "set together with configs"),
        ({"id": "x", "train_urls": ["a"]}, "set together with train_urls or validation_urls"),
        ({"name": "x"}, "but no id is set"),
        ({"stream": True}, "but no id is set"),
        ({"configs": {"a": {"name": "x"}}}, "but no id is set"),
        ({"train_weights": {"a": 1}}, "source 'a'"),
        (MIX | {"train_weights": {"c": 1}}, "source 'c'"),
        (MIX | {"train_weights": {"a": 1}}, "source 'b'"),
        (MIX | {"train_weights": {"a": -1}}, "greater than or equal to 0"),
        (MIX | {"train_weights": [[5, {"a": 1}]]}, r"steps \[5\]"),
        (
            MIX | {"train_weights": [[0, {"a": 1}], [9, {"a": 1}], [9, {"b": 1}]]},
            r"steps \[0, 9, 9\]",
        ),
        (MIX | {"train_weights": [[0, {"c": 1}]]}, "source 'c'"),
    ],
)
def test_incompatible_sources_are_refused(data, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**data)


def test_the_demo_sets_files_and_a_tokenizer_unless_one_is_set():
    config = DataConfig(demo="some/where/")
    assert config.tokenizer == "some/where/tokenizer"
    assert config.urls("train") == ["some/where/train.{1..8}-of-8.jsonl.gz"]
    assert config.urls("validation") == ["some/where/validation.jsonl.gz"]
    assert DataConfig(demo="d", tokenizer="mine").tokenizer == "mine"


def test_urls_are_those_of_the_split_or_empty():
    config = DataConfig(train_urls=["a", "b"])
    assert (config.urls("train"), config.urls("validation")) == (["a", "b"], [])
    assert DataConfig().urls("train") == []


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"id": "x", "validation_urls": ["a"]}, "id"),
        ({"name": "y"}, "name"),
        ({"stream": True}, "stream"),
        ({"demo": "d", "train_urls": ["a"]}, "demo"),
        (MIX | {"id": "x"}, "configs"),
        (MIX | {"train_weights": {"c": 1}}, "train_weights"),
    ],
)
def test_errors_name_the_setting_they_are_about(data, field):
    with pytest.raises(ValidationError) as refused:
        DataConfig(**data)
    assert [error["ctx"]["field"] for error in refused.value.errors()] == [field]


@pytest.mark.parametrize("stream", [True, False])
def test_a_source_of_a_mixture_is_checked_like_a_single_one(stream):
    assert SourceConfig(id="x", name="y", stream=stream).stream is stream
    with pytest.raises(ValidationError, match="no id is set"):
        DataConfig(configs={"a": {"id": "x"}, "b": {"train_urls": ["y"], "name": "z"}})


@pytest.mark.parametrize("setting", ["demo", "configs", "id", "name", "train_urls", "train_weights"])
def test_null_turns_a_source_off(setting):
    config = DataConfig(**{"validation_urls": ["v"], setting: None})
    assert config.urls("validation") == ["v"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], r"steps \[\]"),
        ([[0, {"a": 1}], [9, {"b": 1}], [5, {"a": 1}]], r"steps \[0, 9, 5\]"),
        ([[-1, {"a": 1}], [0, {"b": 1}]], r"steps \[-1, 0\]"),
        ([[0, {"a": 1}, 3]], "train_weights"),
        ([{"a": 1}], "train_weights"),
        ([[0, {"a": -1}]], "greater than or equal to 0"),
        ({"a": "much"}, "valid number"),
        (True, "expected a number|valid"),
    ],
)
def test_invalid_weights_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**MIX, train_weights=weights)


def test_weight_changes_keep_their_steps():
    weights = [[0, {"a": 1}], [1, {"a": 0.5, "b": 0.5}], [1000, {"b": 1}]]
    assert DataConfig(**MIX, train_weights=weights).model_dump(mode="json")["train_weights"] == weights


def test_validation_does_not_modify_its_input():
    settings = {"demo": "d"}
    DataConfig.model_validate(settings)
    assert settings == {"demo": "d"}


def test_urls_are_a_copy():
    config = DataConfig(train_urls=["a"])
    config.urls("train").append("b")
    assert config.train_urls == ["a"]


@pytest.mark.parametrize("setting", ["id", "cache_dir", "text_key"])
def test_an_empty_name_is_refused(setting):
    with pytest.raises(ValidationError, match="at least 1 character"):
        DataConfig(**{setting: ""})


def test_batches_have_positions_if_documents_have_targets_unless_it_is_set():
    chat = {"train_urls": ["a.jsonl"], "format": {"type": "chat"}}
    assert not DataConfig(train_urls=["a.jsonl"]).has_positions
    assert DataConfig(**chat).has_positions
    assert DataConfig(train_urls=["a.jsonl"], reset_positions=True).has_positions
    assert not DataConfig(**chat, reset_positions=False).has_positions
