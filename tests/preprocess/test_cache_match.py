"""Recipes and sources of a cache and of a config: which differences are refused, and how they are named."""

import pytest

from lmtrain.preprocess.recipe import check_recipe, check_sources
from lmtrain.runtime.errors import UserError


def source(url, content="x", start=None):
    return {"url": url, "bytes": 9, "fingerprint": content, "start": start}


A, B, C = map(source, "abc")


def refusal(cached, wanted, complete=True):
    with pytest.raises(UserError) as error:
        check_sources("folder", dict(enumerate(cached)), dict(enumerate(wanted)), complete)
    first, *lines, last = str(error.value).splitlines()
    assert first == "folder: the cache does not match this config"
    assert last == "  choose another data.cache_dir, or delete this folder to build it again"
    return [line.strip() for line in lines]


def test_each_difference_of_a_recipe_is_a_line():
    check_recipe("folder", {"a": {"b": 1}}, {"a": {"b": 1}})
    with pytest.raises(UserError, match=r"a\.b: the cache has 1, this config has nothing\n  a\.c: the cache"):
        check_recipe("folder", {"a": {"b": 1}}, {"a": {"c": 2}})


def test_files_may_move_to_another_folder_and_shards_may_be_missing_until_a_cache_is_complete():
    check_sources("folder", {0: A, 1: B}, {0: source("moved/a"), 1: source("moved/b")}, complete=True)
    check_sources("folder", {1: B}, {0: A, 1: B}, complete=False)


@pytest.mark.parametrize(
    ("cached", "wanted", "complete", "line"),
    [
        ([A, B, C], [A, B], True, "c is in the cache, but no source of this config"),
        ([A, B], [A, B, C], True, "c is a source of this config, but not in the cache"),
        ([B], [C], False, "b is in the cache, but no source of this config"),
        ([A, B], [A, source("b", "y")], True, "b has changed since it was cached"),
        ([A, B], [source("moved/a", "y"), B], False, "a is in the cache, but no source of this config"),
        ([A, B], [B, A], True, "the list of sources has another order or length"),
        ([A, B], [A, B, B], True, "the list of sources has another order or length"),
        ([source("a", "x", 7000)], [A], False, "a from byte 7,000 is in the cache, but no source of this config"),
        # URLs that differ in their credentials only are the same without them
        ([A, source("a", "y")], [source("a", "y"), A], True, "the list of sources has another order or length"),
    ],
)
def test_other_sources_are_named(cached, wanted, complete, line):
    assert refusal(cached, wanted, complete) == [line]


def test_ten_differences_are_shown_and_the_others_counted():
    *shown, last = refusal(list(map(source, "abcdefghijklm")), [])
    assert (len(shown), last) == (10, "and 3 more")
