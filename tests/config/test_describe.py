"""What settings there are, read off the models."""

from datetime import timedelta
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from lmtrain.config.describe import describe, format_settings, sections_of, type_name, written
from lmtrain.optim.config import AdamConfig
from lmtrain.run.config import RunConfig
from lmtrain.tracking.config import JsonConfig

GROUPS = describe(RunConfig)
SETTINGS = [setting for group in GROUPS for setting in group.settings]


def leaves(model, at=""):
    """Dotted names of all settings that are no sections, written independently of `describe`."""
    for name, field in model.model_fields.items():
        path = f"{at}.{name}" if at else name
        text = str(field.annotation)
        below = (
            "[]"
            if "list[lmtrain" in text or "list[typing.Annotated" in text
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
        "trainer.tracker",
        "trainer.tracker[].type",  # of one's own: where to import it from
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


def test_every_setting_says_what_it_means_and_every_group_what_it_is():
    assert not [setting.name for setting in SETTINGS if len(setting.description) < 10]
    assert not [group.title for group in GROUPS if len(group.doc) < 10]


def test_what_kinds_share_comes_once_and_their_own_below_their_type():
    titles = [group.title for group in GROUPS]
    assert titles.index("model") < titles.index("model (type: gpt2)") < titles.index("model (type: llama)")
    assert sum(setting.name == "optimizer.weight_decay" for setting in SETTINGS) == 1


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
    ],
)
def test_types_are_named_as_a_user_would(annotation, expected):
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
    ],
)
def test_defaults_are_written_as_in_a_file(value, expected):
    assert written(value) == expected


def test_the_terminals_list_has_every_setting_with_its_group():
    text = format_settings(GROUPS)
    assert "--trainer.tracker[].save_xla_dumps\n" in text
    assert "--trainer.seed\n" in text
    assert "model (type: gpt2): GPT-2" in text


def test_sections_are_found_inside_lists_maps_and_choices():
    class Part(BaseModel):
        x: int = 0

    assert sections_of(dict[str, list[Part | None]] | int) == [Part]
    assert sections_of(list[int]) == []
