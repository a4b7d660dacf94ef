"""Additions to tests/data/test_config.py."""

import pytest
from pydantic import ValidationError

from lmtrain.data.config import DataConfig, SourceConfig

MIX = {"configs": {"a": {"id": "x"}, "b": {"train_urls": ["y"]}}}


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
def test_what_does_not_fit_is_told_at_the_setting_it_is_about(data, field):
    with pytest.raises(ValidationError) as refused:
        DataConfig(**data)
    assert [error["ctx"]["field"] for error in refused.value.errors()] == [field]


@pytest.mark.parametrize("stream", [True, False])
def test_a_source_of_a_mix_is_checked_like_a_single_one(stream):
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
        ([], r"begin at step 0 and ascend, but are at steps \[\]"),
        ([[0, {"a": 1}], [9, {"b": 1}], [5, {"a": 1}]], r"ascend, but are at steps \[0, 9, 5\]"),
        ([[-1, {"a": 1}], [0, {"b": 1}]], r"at steps \[-1, 0\]"),
        ([[0, {"a": 1}, 3]], "train_weights"),
        ([{"a": 1}], "train_weights"),
        ([[0, {"a": -1}]], "greater than or equal to 0"),
        ({"a": "much"}, "valid number"),
        (True, "expected a number|valid"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**MIX, train_weights=weights)


def test_weights_that_change_keep_their_steps():
    weights = [[0, {"a": 1}], [1, {"a": 0.5, "b": 0.5}], [1000, {"b": 1}]]
    assert DataConfig(**MIX, train_weights=weights).model_dump(mode="json")["train_weights"] == weights


def test_reading_settings_changes_none_of_them():
    settings = {"demo": "d"}
    DataConfig.model_validate(settings)
    assert settings == {"demo": "d"}


def test_urls_are_a_copy():
    config = DataConfig(train_urls=["a"])
    config.urls("train").append("b")
    assert config.train_urls == ["a"]


@pytest.mark.parametrize("setting", ["id", "cache_dir", "text_key"])
def test_a_text_that_names_something_is_not_empty(setting):
    with pytest.raises(ValidationError, match="at least 1 character"):
        DataConfig(**{setting: ""})
