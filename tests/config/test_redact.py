"""Removing secrets from URLs."""

import copy

import pytest

from lmtrain.config.redact import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://me:word@host/a.jsonl", "https://***@host/a.jsonl"),
        ("https://token@host/a", "https://***@host/a"),
        ("https://host/a.jsonl?X-Amz-Signature=abc&x=y", "https://host/a.jsonl?***"),
        ("s3://me:word@bucket/a?b=c", "s3://***@bucket/a?***"),
        ("see https://a:b@c/d?e f", "see https://***@c/d?*** f"),
        ("gs://bucket/train.{1..8}.jsonl", "gs://bucket/train.{1..8}.jsonl"),
        ("folder/what?.jsonl", "folder/what?.jsonl"),
        ("gs://bucket/a@b/c", "gs://bucket/a@b/c"),
        ("me@host", "me@host"),
        ("", ""),
    ],
)
def test_only_passwords_and_signatures_are_removed_from_urls(text, expected):
    assert redact(text) == expected


def test_nested_texts_are_redacted_and_the_original_is_unchanged():
    value = {"a": [{"b": "x://p@q"}], "x://p@q": 3, "c": None, "d": (1.5, True)}
    assert redact(value) == {"a": [{"b": "x://***@q"}], "x://p@q": 3, "c": None, "d": (1.5, True)}
    assert value["a"][0]["b"] == "x://p@q"


SECRET = "https://me:word@host/a?signature=abc"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SECRET, "https://***@host/a?***"),
        (f"{SECRET} {SECRET}", "https://***@host/a?*** https://***@host/a?***"),
        ("https://me:p%40ss@host:8080/a", "https://***@host:8080/a"),
        ("https://me:pa?ss@host/a", "https://***@host/a"),
        ("https://host/?a", "https://host/?***"),
        ("https://host", "https://host"),
        ("why? because", "why? because"),
        ("a://b why? because", "a://b why? because"),
        ("owner/name@revision", "owner/name@revision"),
    ],
)
def test_each_url_in_a_text_loses_its_password_and_its_query(text, expected):
    assert redact(text) == expected


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_a_text_is_redacted_at_any_depth(depth):
    value, expected = SECRET, "https://***@host/a?***"
    for _ in range(depth):
        value, expected = {"k": [1, value]}, {"k": [1, expected]}
    assert redact(value) == expected


def test_names_keep_their_order_and_the_input_is_unchanged():
    value = {SECRET: [SECRET, {"b": SECRET}], "a": {"z": None, "y": 1.5}}
    before = copy.deepcopy(value)
    result = redact(value)
    assert value == before
    assert list(result) == [SECRET, "a"]
    assert list(result["a"]) == ["z", "y"]


@pytest.mark.parametrize("value", [None, True, 0, 1.5, [], {}])
def test_other_values_are_unchanged(value):
    assert redact(value) == value
    assert type(redact(value)) is type(value)


def test_redacting_twice_changes_nothing():
    assert redact(redact(SECRET)) == redact(SECRET)
