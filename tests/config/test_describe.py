"""Descriptions of all settings, and a resolved config as YAML with origins."""

from collections import Counter
from datetime import timedelta
from typing import Literal

import pytest
import yaml
from pydantic import Field

from lmtrain.config.describe import describe, format_settings, sections_of, show, written
from lmtrain.config.load import load_config
from lmtrain.config.section import Section
from lmtrain.config.tree import ConfigTree, Origin
from lmtrain.run.config import RunConfig, resolved
from lmtrain.tracking.config import JsonConfig

GROUPS = describe(RunConfig)
SETTINGS = [setting for group in GROUPS for setting in group.settings]


def leaves(model, at=""):
    """Dotted names of all settings that are not sections."""
    for name, field in model.model_fields.items():
        below = sections_of(field.annotation)
        yield from (leaf for section in below for leaf in leaves(section, f"{at}{name}."))
        if not below:
            yield f"{at}{name}"


def test_every_setting_is_described():
    described = {setting.name.replace("[]", "").replace(".<name>", "") for setting in SETTINGS}
    types = {name for name in leaves(RunConfig) if name.endswith(".type")} - {"model.rope.type"}  # in titles
    assert set(leaves(RunConfig)) - types - described == set()
    assert {"lora", "data.configs", "trainer.tracker", "trainer.tracker.type"} <= described


def test_every_setting_and_every_group_has_a_description():
    assert not [setting.name for setting in SETTINGS if len(setting.description) < 10]
    assert not [group.title for group in GROUPS if len(group.doc) < 10]


def test_settings_shared_by_kinds_come_once_and_others_below_their_type():
    titles = [group.title for group in GROUPS]
    assert titles.index("model") < titles.index("model (type: gpt2)") < titles.index("model (type: llama)")
    assert sum(setting.name == "optimizer.weight_decay" for setting in SETTINGS) == 1
    titles = {group.title for group in GROUPS for setting in group.settings if setting.name == "optimizer.gamma"}
    assert titles == {"optimizer (type: sophia-h, sophia-g)", "optimizer (type: sophia-g)"}


class Small(Section):
    """A small part."""

    size: int = Field(description="How large it is")


class Left(Section):
    """The left kind."""

    type: Literal["left"] = Field("left", description="The kind of side")
    reach: int = Field(3, description="How far it reaches")


class Right(Section):
    """The right kind."""

    type: Literal["right"] = Field("right", description="The kind of side")
    grip: bool = Field(False, description="Whether it holds")


class Whole(Section):
    """All of it."""

    name: str | None = Field(None, description="What it is called")
    later: float = Field(0.5, description="What is to come")
    side: Left | Right = Field(Left(), description="One of two")
    parts: list[Small] = Field([Small(size=2)], description="Several parts")
    named: dict[str, Small] = Field({}, description="Parts with names")


def test_the_exact_text_for_the_terminal():
    assert format_settings(describe(Whole)) == (
        "settings, as --section.field VALUE or in a file:\n"
        "\ntop level: All of it.\n"
        "  --name\n        What it is called\n        text | null, default null\n"
        "  --later\n        What is to come\n        float, default 0.5\n"
        "  --parts\n        Several parts\n        list of map, default [{size: 2}]\n"
        "  --named\n        Parts with names\n        map of text to map, default {}\n"
        "\nside (type: left): The left kind.\n"
        "  --side.reach\n        How far it reaches\n        int, default 3\n"
        "\nside (type: right): The right kind.\n"
        "  --side.grip\n        Whether it holds\n        true/false, default false\n"
        "\nparts[]: A small part.\n"
        "  --parts[].size\n        How large it is\n        int, default required\n"
        "\nnamed.<name>: A small part.\n"
        "  --named.<name>.size\n        How large it is\n        int, default required\n"
    )


def test_each_setting_of_a_class_comes_once_per_section():
    described = [(group.doc, setting.name) for group in GROUPS for setting in group.settings]
    assert not [key for key, count in Counter(described).items() if count > 1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (1e-5, "1.0e-05"),
        ("a b", "a b"),
        ("12", "'12'"),
        ({"a": "b"}, "{a: b}"),
        (timedelta(minutes=90), "1h30m"),
        ([JsonConfig()], "[{type: json}]"),
        ("null", "'null'"),
        ("ü", "ü"),
        ({"b": 1, "a": [2]}, "{b: 1, a: [2]}"),
        ([Left(), Right(grip=True)], "[{type: left}, {type: right, grip: true}]"),
        ([Small(size=4), 3], "[{size: 4}, 3]"),
        ("word " * 100 + "end", "word " * 100 + "end"),
    ],
)
def test_defaults_are_written_as_yaml(value, expected):
    assert written(value) == expected


NOBODY = ConfigTree()


def test_origins_are_aligned_after_the_longest_line():
    layer = ConfigTree({"a": {"bcd": 1}}, {("a",): Origin("f.yaml", 1), ("a", "bcd"): Origin("f.yaml", 2)})
    assert show({"a": {"bcd": 1}, "e": None}, layer) == "a:\n  bcd: 1  # f.yaml:2\ne: null   # default\n"


@pytest.mark.parametrize(
    "data",
    [
        {"a": []},
        {"a": [{"b": 1}, {}]},
        {"a": [{"b": 1}, 2]},
        {"a": [{"b": {"c": {"d": 1}}}, {"b": [{"c": 1}, {"d": 2, "e": []}]}]},
        {"a": {"b": [{"c": [{"d": 1}, {"d": 2}]}]}, "e": 1},
        {"a": [[0, {"b": 1}], [5, {"b": 2}]]},
        {"a": 1e-5, "b": 1e22, "c": 0.1, "d": -0.0, "e": 10**30},
        {"a": "line\nline", "b": {"c": "line\n\n  line\n"}},
        {"a": "word " * 5000, "b": {"c": "x" * 20_000}},
        {"on": 1, "1": 2, "a: b": 3, "": 4, "null": 5},
        {"a": {"type": "x", "b": 1}, "type": "y"},
        {"a": ["a: b", "#x", "null", "12", "ü", "- x", "'", '"', "{x", "trailing "]},
        {},
    ],
    ids=str,
)
def test_shown_data_loads_as_the_same_data(data):
    assert (yaml.safe_load(show(data, NOBODY)) or {}) == data


def test_the_type_comes_first_at_any_depth_and_the_order_is_kept():
    data = {"b": 1, "a": {"z": 1, "type": "t", "y": 2}, "l": [{"n": 1, "type": "u", "m": {"k": 1, "type": "v"}}]}
    shown = show(data, NOBODY)
    assert [line.split("#")[0].rstrip() for line in shown.splitlines()] == [
        *("b: 1", "a:", "  type: t", "  z: 1", "  y: 2"),
        *("l:", "- type: u", "  n: 1", "  m:", "    type: v", "    k: 1"),
    ]


def test_origins_with_an_include_a_flag_and_a_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep.yaml").write_text("- every: 5\n  until: 10\n- every: 50\n")
    (tmp_path / "run.yaml").write_text(
        "trainer:\n  checkpointer:\n    keep: !include keep.yaml\n  axis_resources: {mlp: model}\n"
        "  tracker:\n    type: tensorboard\n    logdir: x\ndata:\n  train_urls: [a, b]\n"
    )
    loaded = load_config(RunConfig, "run.yaml", [("optimizer.learning_rate", "1e-3"), ("trainer.id", "x")])
    output = show(resolved(loaded.config), loaded.tree)
    assert yaml.safe_load(output) == resolved(loaded.config)
    for line in output.splitlines():
        assert line.partition(" # ")[0].rstrip().endswith(":") != (" # " in line), line
    lines = {" ".join(line.split()) for line in output.splitlines()}
    assert lines >= {
        "- every: 5 # keep.yaml:1",
        "until: 10 # keep.yaml:2",
        "- every: 50 # keep.yaml:3",
        "until: null # default",
        "mlp: model # run.yaml:4",
        "logdir: x # run.yaml:7",
        "train_urls: [a, b] # run.yaml:9",
        "learning_rate: 0.001 # --optimizer.learning_rate",
        "id: x # --trainer.id",
        "type: adam # default",
    }


def test_the_origin_of_a_value_has_no_secrets():
    layer = ConfigTree({"a": 1}, {("a",): Origin("https://me:word@host/a.yaml?sig=b", 3)})
    assert show({"a": 1}, layer) == "a: 1  # https://***@host/a.yaml?***:3\n"
