"""Additions to tests/config/test_redact.py."""

import copy

import pytest

from lmtrain.config.redact import redact

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


def test_names_stay_in_their_order_and_the_input_is_as_it_was():
    value = {SECRET: [SECRET, {"b": SECRET}], "a": {"z": None, "y": 1.5}}
    before = copy.deepcopy(value)
    result = redact(value)
    assert value == before
    assert list(result) == [SECRET, "a"]
    assert list(result["a"]) == ["z", "y"]


@pytest.mark.parametrize("value", [None, True, 0, 1.5, [], {}])
def test_what_is_no_text_stays(value):
    assert redact(value) == value
    assert type(redact(value)) is type(value)


def test_what_is_redacted_stays_so():
    assert redact(redact(SECRET)) == redact(SECRET)
