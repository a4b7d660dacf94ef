"""Layers: merging, and origins of values."""

import copy

import pytest

from lmtrain.config.tree import ConfigTree, Origin, dotted, walk_leaves

LOW, HIGH = Origin("low.yaml", 1), Origin("high.yaml", 2)


@pytest.mark.parametrize(
    ("under", "over", "merged"),
    [
        ({}, {}, {}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": [1, 2, 3]}, {"a": [4]}, {"a": [4]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 2}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}),
        ({"b": 1, "a": 2}, {"c": 3, "b": 4}, {"b": 4, "a": 2, "c": 3}),
    ],
)
def test_maps_are_merged_and_other_values_are_replaced(under, over, merged):
    result = ConfigTree(under).merge(ConfigTree(over)).data
    assert result == merged
    assert list(result) == list(merged)


def test_merging_changes_neither_layer():
    under = ConfigTree({"a": {"b": {"c": 1}}}, {("a",): LOW, ("a", "b"): LOW, ("a", "b", "c"): LOW})
    over = ConfigTree({"a": {"b": {"c": 2}, "d": [1]}}, {("a",): HIGH})
    before = copy.deepcopy((under, over))
    under.merge(over)
    assert (under, over) == before


def test_a_value_keeps_its_origin_until_it_is_replaced():
    under = ConfigTree({"a": {"b": 1, "c": 1}}, {("a",): LOW, ("a", "b"): LOW, ("a", "c"): LOW})
    over = ConfigTree({"a": {"b": 2}}, {("a",): HIGH, ("a", "b"): HIGH})
    merged = under.merge(over)
    assert merged.origin_of(("a", "b")) == HIGH
    assert merged.origin_of(("a", "c")) == LOW


def test_values_below_a_replaced_value_leave_no_origin():
    under = ConfigTree({"a": [{"b": 1}]}, {("a",): LOW, ("a", 0): LOW, ("a", 0, "b"): LOW})
    merged = under.merge(ConfigTree({"a": [{"c": 1}]}, {("a",): HIGH}))
    assert merged.origin_of(("a", 0, "b")) == HIGH


def test_the_origin_of_an_unset_path_is_that_of_the_nearest_enclosing_value():
    layer = ConfigTree({}, {("a",): LOW, ("a", "b"): HIGH})
    assert layer.origin_of(("a", "b", "c", 0)) == HIGH
    assert layer.origin_of(("a", "x")) == LOW
    assert layer.origin_of(("x",)) is None
    assert layer.origin_of(()) is None


def test_leaves_are_walked_in_order_and_an_empty_map_is_a_leaf():
    tree = {"b": {"x": 1, "y": {}}, "a": [{"c": 2}], "": None}
    assert list(walk_leaves(tree)) == [(("b", "x"), 1), (("b", "y"), {}), (("a",), [{"c": 2}]), (("",), None)]
    assert list(walk_leaves(7)) == [((), 7)]


@pytest.mark.parametrize(
    ("path", "text"),
    [((), ""), (("a",), "a"), (("trainer", "tracker", 0, "type"), "trainer.tracker[0].type"), (("a", 1, 2), "a[1][2]")],
)
def test_paths_as_dotted_names(path, text):
    assert dotted(path) == text
