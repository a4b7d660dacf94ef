"""Overrides: splitting the command line, values in YAML, later flags win."""

import pytest

from lmtrain.config.load import apply_overrides, split_overrides
from lmtrain.config.tree import ConfigTree, Origin
from lmtrain.runtime.errors import UserError


@pytest.mark.parametrize(
    ("argv", "rest", "overrides"),
    [
        ([], [], []),
        (["c.yaml"], ["c.yaml"], []),
        (["c.yaml", "--a.b", "1"], ["c.yaml"], [("a.b", "1")]),
        (["--a.b=1", "c.yaml"], ["c.yaml"], [("a.b", "1")]),
        (["--a.b=", "c.yaml"], ["c.yaml"], [("a.b", "")]),
        (["--a.b=x=y"], [], [("a.b", "x=y")]),
        (["--a.b", "-5", "c.yaml"], ["c.yaml"], [("a.b", "-5")]),
        (["--a.b", "", "c.yaml"], ["c.yaml"], [("a.b", "")]),
        (["--a", "1", "--a", "2"], [], [("a", "1"), ("a", "2")]),
        (["c.yaml", "--output", "d", "--a", "1"], ["c.yaml", "--output", "d"], [("a", "1")]),
        (["c.yaml", "--output=d", "-h"], ["c.yaml", "--output=d", "-h"], []),
    ],
)
def test_overrides_are_separated_from_the_arguments_of_the_subcommand(argv, rest, overrides):
    assert split_overrides(argv, ["--output", "-h"]) == (rest, overrides)


@pytest.mark.parametrize("argv", [["--trainer.seed"], ["--trainer.seed", "--output", "x"], ["--trainer.seed", "--"]])
def test_an_override_without_a_value_is_an_error(argv):
    with pytest.raises(UserError, match=r"^--trainer\.seed needs a value, for example --trainer\.seed VALUE$"):
        split_overrides(argv, ["--output"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6E-4", 6e-4),
        ("null", None),
        ("{c: [1, 2.5]}", {"c": [1, 2.5]}),
        ("'100'", "100"),
        ("data/{1..8}.jsonl", "data/{1..8}.jsonl"),
    ],
)
def test_values_are_parsed_as_yaml(text, value):
    data = apply_overrides(ConfigTree(), [("a.b", text)]).data
    assert data == {"a": {"b": value}}
    assert type(data["a"]["b"]) is type(value)


@pytest.mark.parametrize(("name", "text"), [("a.b", ""), ("a.b", " "), ("a.b", "caf\udce9"), ("a.b\udce9", "1")])
def test_a_value_that_is_empty_or_not_utf8_is_an_error(name, text):
    with pytest.raises(UserError, match=r"^--a\.b"):
        apply_overrides(ConfigTree(), [(name, text)])


def test_a_later_override_wins_and_the_others_are_kept():
    layer = apply_overrides(ConfigTree(), [("a.b", "1"), ("a.c", "2"), ("a.b", "3"), ("d", "[1]"), ("d", "[2]")])
    assert layer.data == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert (layer.origin_of(("a", "b")), layer.origin_of(("d", 0))) == (Origin("--a.b"), Origin("--d"))


def test_a_section_can_be_read_from_a_file_and_changed_by_a_later_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.yaml").write_text("x: 1\ny: 2\n")
    layer = apply_overrides(ConfigTree(), [("model", "include m.yaml"), ("model.y", "3")])
    assert layer.data == {"model": {"x": 1, "y": 3}}
    assert str(layer.origin_of(("model", "x"))) == "m.yaml:1"
    assert str(layer.origin_of(("model", "y"))) == "--model.y"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("", "1", "--: expected a dotted name such as --trainer.num_train_steps"),
        ("a..b", "1", "--a..b: expected a dotted name"),
        ("trainer.wandb,group", "g", "--trainer.wandb,group: no such setting; did you mean --trainer.wandb.group?"),
        ("a", "{", "--a: '{' is not valid YAML"),
        ("a", "{b: 1, b: 2}", "--a: duplicate key 'b'"),
        ("a", "!include x.yaml", '--a: write "include x.yaml" (without !) on the command line'),
        ("a", "include gone.yaml", "gone.yaml: no such file"),
        ("a", "include ", "--a: "),
        ("a", "a\0b", "--a: 'a\\x00b' is not valid YAML"),
    ],
)
def test_an_invalid_override_names_its_flag(name, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        apply_overrides(ConfigTree(), [(name, text)])
    assert str(caught.value).startswith(message)


def test_an_include_is_found_among_the_shipped_configs_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layer = apply_overrides(ConfigTree(), [("data", "include data/wikitext103.yaml")])
    assert layer.data["data"]["id"] == "Salesforce/wikitext"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext103.yaml").write_text("id: mine\n")
    assert apply_overrides(ConfigTree(), [("data", "include data/wikitext103.yaml")]).data == {"data": {"id": "mine"}}
