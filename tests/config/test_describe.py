"""Descriptions of all settings."""

from collections import Counter
from datetime import timedelta
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from lmtrain.config.base import Section
from lmtrain.config.describe import describe, format_settings, sections_of, type_name, written
from lmtrain.optim.config import AdamConfig
from lmtrain.run.config import RunConfig
from lmtrain.tracking.config import JsonConfig

GROUPS = describe(RunConfig)
SETTINGS = [setting for group in GROUPS for setting in group.settings]


def leaves(model, at=""):
    """Dotted names of all settings that are not sections, computed independently of `describe`."""
    for name, field in model.model_fields.items():
        path = f"{at}.{name}" if at else name
        text = str(field.annotation)
        below = (
            "[]"
            if "list[lmtrain" in text or "list[str | lmtrain" in text or "list[typing.Annotated" in text
            else ".<name>"
            if text.startswith(("dict[", "typing.Optional[dict[")) and "lmtrain" in text
            else ""
        )
        sections = sections_of(field.annotation)
        for section in sections:
            yield from leaves(section, path + below)
        if not sections:
            yield path


def test_every_setting_is_described():
    described = {setting.name for setting in SETTINGS}
    expected = {name for name in leaves(RunConfig) if not name.endswith(".type") or name == "model.rope.type"}
    assert expected <= described
    assert set(described - expected) == {
        "data.configs",
        "eval_harness",
        "lora",
        "eval_harness.task_spec",
        "trainer.early_stopping",
        "trainer.checkpointer.keep_best",
        "trainer.tracker",
        "trainer.tracker[].type",  # import path of a custom tracker
        "trainer.profiler",
        "trainer.checkpointer.keep",
        "trainer.train_batch_size",
        "trainer.model_averaging",
        "optimizer.skip_bad_steps",
    }


def test_no_group_describes_a_setting_twice():
    for group in GROUPS:
        names = [setting.name for setting in group.settings]
        assert len(names) == len(set(names))


def test_every_setting_and_every_group_has_a_description():
    assert not [setting.name for setting in SETTINGS if len(setting.description) < 10]
    assert not [group.title for group in GROUPS if len(group.doc) < 10]


def test_settings_shared_by_kinds_come_once_and_others_below_their_type():
    titles = [group.title for group in GROUPS]
    assert titles.index("model") < titles.index("model (type: gpt2)") < titles.index("model (type: llama)")
    assert sum(setting.name == "optimizer.weight_decay" for setting in SETTINGS) == 1


def test_settings_that_some_kinds_share_are_titled_by_these():
    titles = {group.title for group in GROUPS for setting in group.settings if setting.name == "optimizer.gamma"}
    assert titles == {"optimizer (type: sophia-h, sophia-g)", "optimizer (type: sophia-g)"}


def test_the_text_for_the_terminal_has_every_setting_with_its_group():
    text = format_settings(GROUPS)
    assert "--trainer.tracker[].save_xla_dumps\n" in text
    assert "--trainer.seed\n" in text
    assert "model (type: gpt2): GPT-2" in text


def test_sections_are_found_inside_lists_maps_and_unions():
    class Part(BaseModel):
        x: int = 0

    assert sections_of(dict[str, list[Part | None]] | int) == [Part]
    assert sections_of(list[int]) == []


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


def test_groups_are_titled_by_section_and_kind_and_come_in_order():
    assert [(group.title, [setting.name for setting in group.settings]) for group in describe(Whole)] == [
        ("top level", ["name", "later", "parts", "named"]),
        ("side (type: left)", ["side.reach"]),
        ("side (type: right)", ["side.grip"]),
        ("parts[]", ["parts[].size"]),
        ("named.<name>", ["named.<name>.size"]),
    ]


def test_names_are_prefixed_with_the_section():
    assert [setting.name for setting in describe(Small, "a.b")[0].settings] == ["a.b.size"]


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
        (float, "float"),
        (bool, "true/false"),
        (type(None), "null"),
        (timedelta, "duration"),
        (Annotated[Annotated[str, Field(min_length=1)], Field(max_length=3)], "text"),
        (int | float | None, "int | float | null"),
        (Annotated[int, Field(ge=1)] | int, "int"),
        (Small, "map"),
        (Left | Right, "map"),
        (list[list[int]], "list of list of int"),
        (dict[str, list[str] | None], "map of text to list of text | null"),
        (tuple[int, dict[str, float]], "[int, map of text to float]"),
        (Literal["a"] | bool, "a | true/false"),
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
        ([1, None], "[1, null]"),
        ({"a": "b"}, "{a: b}"),
        (timedelta(minutes=90), "1h30m"),
        ([JsonConfig()], "[{type: json}]"),
        (0, "0"),
        (0.1, "0.1"),
        ("", "''"),
        ("null", "'null'"),
        ("true", "'true'"),
        ("a: b", "'a: b'"),
        ("#a", "'#a'"),
        ("ü", "ü"),
        ([], "[]"),
        ({}, "{}"),
        ({"b": 1, "a": [2]}, "{b: 1, a: [2]}"),
        (timedelta(0), "0s"),
        ([Left(), Right(grip=True)], "[{type: left}, {type: right, grip: true}]"),
        ([Small(size=4), 3], "[{size: 4}, 3]"),
        ("word " * 100 + "end", "word " * 100 + "end"),
    ],
)
def test_defaults_are_written_as_yaml(value, expected):
    assert written(value) == expected
