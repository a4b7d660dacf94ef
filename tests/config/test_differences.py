"""Differences between plain trees, one line for each leaf."""

import pytest

from lmtrain.config.differences import describe_differences


@pytest.mark.parametrize(
    "tree", [{}, None, 3, [1, 2], {"a": {"b": [1, {"c": None}]}}, {"ünï": "çode"}, {"a": {}}, {"a": 0.1}]
)
def test_equal_trees_have_no_differences(tree):
    assert describe_differences(tree, tree, "old", "new") == []


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        ({"a": {"b": 8192}}, {"a": {"b": 50257}}, ["a.b: the cache has 8192, this run has 50257"]),
        ({"a": 1, "m": 0}, {"m": 0}, ["a: the cache has 1, this run has nothing"]),
        ({"m": 0}, {"m": 0, "a": "x"}, ["a: the cache has nothing, this run has 'x'"]),
        ({"a": [1, 2]}, {"a": [2, 1]}, ["a: the cache has [1, 2], this run has [2, 1]"]),
        (
            {"a": {"b": 1}},
            {"a": 2},
            ["a.b: the cache has 1, this run has nothing", "a: the cache has nothing, this run has 2"],
        ),
        (
            {"z": 1, "a": 1, "m": 0},
            {"a": 2, "z": 2, "m": 0},
            ["z: the cache has 1, this run has 2", "a: the cache has 1, this run has 2"],
        ),
    ],
)
def test_each_leaf_that_differs_is_one_line_in_the_order_written(before, now, lines):
    assert describe_differences(before, now, "the cache", "this run") == lines


def test_a_long_value_is_truncated():
    (line,) = describe_differences({"a": "x" * 500}, {"a": 1}, "old", "new")
    assert line == "a: old has '" + "x" * 76 + "..., new has 1"
