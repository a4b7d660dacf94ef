"""Differences between plain trees, one line for each leaf."""

import pytest

from lmtrain.config.tree import describe_differences


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        *((tree, tree, []) for tree in ({}, None, [1, 2], {"a": {"b": [1, {"c": None}], "d": {}}}, {"ünï": 0.1})),
        ({"a": {"b": 8192}}, {"a": {"b": 50257}}, ["a.b: the cache has 8192, this run has 50257"]),
        ({"a": 1, "m": 0}, {"m": 0}, ["a: the cache has 1, this run has nothing"]),
        ({"m": 0}, {"m": 0, "a": "x"}, ["a: the cache has nothing, this run has 'x'"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a: the cache has [1, 2], this run has [2, 1]"]),
        (
            {"a": {"b": 1}},
            {"a": 2},
            ["a.b: the cache has 1, this run has nothing", "a: the cache has nothing, this run has 2"],
        ),
        ({"z": 1, "a": 1}, {"a": 2, "z": 2}, [f"{name}: the cache has 1, this run has 2" for name in ("z", "a")]),
    ],
)
def test_each_leaf_that_differs_is_one_line_in_the_order_written(before, now, lines):
    assert describe_differences(before, now, "the cache", "this run") == lines


def test_a_long_value_is_truncated():
    (line,) = describe_differences({"a": "x" * 500}, {"a": 1}, "old", "new")
    assert line == "a: old has '" + "x" * 76 + "..., new has 1"


def test_secrets_are_neither_compared_nor_shown():
    before = {"a": {"api_key": "one"}, "b": ["https://me:word@host/a?sig=1"], "c": "https://x:y@host/b"}
    now = {"a": {"api_key": "two"}, "b": ["https://***@host/a?***"], "c": "https://z:u@host/c"}
    assert describe_differences(before, now, "old", "new") == [
        "c: old has 'https://***@host/b', new has 'https://***@host/c'"
    ]


def test_the_form_of_a_url_that_earlier_versions_wrote_is_the_same():
    now = {"a": ["https://host/a.jsonl?version=1&sig=b"]}
    assert describe_differences({"a": ["https://host/a.jsonl?***"]}, now, "old", "new") == []
    assert describe_differences({"a": ["https://host/b.jsonl?***"]}, now, "old", "new") != []
