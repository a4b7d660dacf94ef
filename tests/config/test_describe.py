"""Descriptions of all settings."""

from collections import Counter
from datetime import timedelta
from typing import Annotated, Literal

import pytest
from pydantic import Field

from lmtrain.config.describe import describe, format_settings, sections_of, type_name, written
from lmtrain.config.section import Section
from lmtrain.optim.config import AdamConfig
from lmtrain.run.config import RunConfig
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
    ("annotation", "expected"),
    [
        (int, "int"),
        (str | None, "text | null"),
        (list[str], "list of text"),
        (dict[str, float], "map of text to float"),
        (Literal["a", "b"], "a | b"),
        (Annotated[int, Field(ge=1)] | list[int], "int | list of int"),
        (list[tuple[int, str]], "list of [int, text]"),
        (timedelta | None, "duration | null"),
        (bool | AdamConfig, "true/false | map"),
        (Annotated[int, Field(ge=1)] | int, "int"),
    ],
)
def test_readable_names_of_types(annotation, expected):
    assert type_name(annotation) == expected


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
