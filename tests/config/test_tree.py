"""Trees of settings: merging, origins of values, differences."""

import copy

import pytest

from lmtrain.config.tree import ConfigTree, Origin, describe_differences, dotted, walk_leaves

LOW, HIGH = Origin("low.yaml", 1), Origin("high.yaml", 2)


@pytest.mark.parametrize(
    ("under", "over", "merged"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3, "d": 4}}, {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"a": [1, 2, 3]}, {"a": [4]}, {"a": [4]}),
        ({"a": {"b": 1}}, {"a": 2}, {"a": 2}),
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
    [((), ""), (("trainer", "tracker", 0, "type"), "trainer.tracker[0].type"), (("a", 1, 2), "a[1][2]")],
)
def test_paths_as_dotted_names(path, text):
    assert dotted(path) == text


@pytest.mark.parametrize(
    ("before", "now", "lines"),
    [
        *((tree, tree, []) for tree in (None, {"a": {"b": [1, {"c": None}], "d": {}}})),
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


def test_secrets_are_neither_compared_nor_shown():
    before = {"a": {"api_key": "one"}, "b": ["https://me:word@host/a?sig=1"], "c": "https://x:y@host/b"}
    now = {"a": {"api_key": "two"}, "b": ["https://***@host/a?***"], "c": "https://z:u@host/c"}
    assert describe_differences(before, now, "old", "new") == [
        "c: old has 'https://***@host/b', new has 'https://***@host/c'"
    ]
