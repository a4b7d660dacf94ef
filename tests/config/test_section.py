"""Sections: immutable, unknown names are errors, roles of settings, texts, durations."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_core import PydanticCustomError

from lmtrain.config.describe import sections_of
from lmtrain.config.section import (
    Duration,
    Role,
    Section,
    architecture,
    changeable,
    execution,
    format_duration,
    identity,
    parse_duration,
    problem_of_text,
    role_of,
    settings_of,
    tunable,
)
from lmtrain.data.config import DataConfig
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import identity as identity_of
from lmtrain.run.run import run_id


class Small(Section):
    count: int = Field(1, ge=1)
    share: float | None = None
    flag: bool = False
    either: bool | int = False


class WrongDefault(Section):
    count: int = Field(0, ge=1)


def test_a_bool_is_no_number_values_are_frozen_and_defaults_are_validated():
    for name in ("count", "share"):
        with pytest.raises(ValidationError, match=name):
            Small(**{name: True})
    assert Small(flag=True, either=True).either is True
    with pytest.raises(ValidationError, match="frozen"):
        Small().count = 2
    with pytest.raises(ValidationError, match="count"):
        WrongDefault()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is empty") for text in ("", "\n")),
        *((text, "not UTF-8") for text in ("a\0b", "caf\udce9")),
        *((text, "white space") for text in ("cache ", "cache\r\n")),
        ("${SCRATCH}/cache", "${SCRATCH}"),
        ("$(pwd)/a", "$(pwd)"),
        ("%USERPROFILE%/a", "%USERPROFILE%"),
        ("{{ folder }}/a", "{{ folder }}"),
        ("gs://bucket/${oc.env:USER}/a", "${oc.env:USER}"),
        ("~nobody-of-this-name/a", "nobody-of-this-name"),
    ],
)
def test_a_name_or_path_that_cannot_be_meant_is_a_problem(text, problem):
    assert problem in problem_of_text(text)


@pytest.mark.parametrize(
    "text",
    [
        *("~/a", "~", "~5B tokens", "{a,b}/{{c,d},e}/{1..8}.jsonl", "100%", "a/%E4%BD%A0%20b", "az://$web/%E4%BDA%a"),
        *("https://me:$WORD@host/a?x=${Y}", "owner/name@main", "price$"),
    ],
)
def test_other_names_and_paths_are_none(text):
    assert problem_of_text(text) is None


def test_text_settings_are_checked_unless_they_are_declared_as_other_text():
    bad = {
        "data": {"train_urls": ["a", ""], "cache_dir": "$A/b", "name": " ", "id": "a"},
        "trainer": {"id": "", "log_dir": "${A}/${run_id}", "tracker": {"project": "$P"}},
        "hf_save_path": "x/$run_id",
    }
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate(bad)
    places = {".".join(map(str, error["loc"])) for error in caught.value.errors() if error["type"] == "text"}
    assert places == {
        *("hf_save_path", "data.train_urls", "data.cache_dir", "data.name"),
        *("trainer.id", "trainer.log_dir", "trainer.tracker.0.wandb.project"),
    }
    good = {
        "data": {"train_urls": ["a"], "format": {"type": "completion", "separate_with": "", "input_field": "$a"}},
        "optimizer": {"weight_decay_modules": ".*kernel$"},
        "trainer": {"sample_prompts": ["{{x}} $HOME"], "checkpointer": {"base_path": "a/${run_id}"}},
        "hf_save_path": "x/${run_id}",
    }
    RunConfig.model_validate(good)


SIZES = {"hidden_dim": 64, "num_heads": 4, "num_layers": 2, "intermediate_dim": 128}


class SmallLlama(LlamaConfig):
    """A subclass with other defaults."""

    hidden_dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    intermediate_dim: int = Field(128, ge=64)


class Own(LlamaConfig):
    """A subclass with an additional setting, which nothing reads."""

    temperature: float = 1.0


class Bytes(DataConfig):
    """A subclass with another default, of a section without `type`."""

    tokenizer: str = "byte"


def test_other_defaults_make_the_same_run_as_the_same_values_written_out():
    subclassed, plain = RunConfig(model=SmallLlama(seq_len=128)), RunConfig(model=LlamaConfig(seq_len=128, **SIZES))
    assert subclassed == plain
    assert type(subclassed.model) is LlamaConfig
    assert subclassed.model.model_fields_set == {"seq_len", *SIZES}
    assert identity_of(subclassed) == identity_of(plain)
    assert identity_of(plain)["model"]["hidden_dim"] == 64
    assert (resolved(subclassed), run_id(subclassed, "a")) == (resolved(plain), run_id(plain, "a"))
    data = RunConfig(data=Bytes()).data
    assert (type(data), data.tokenizer) == (DataConfig, "byte")


def test_an_additional_setting_of_the_subclass_is_refused():
    with pytest.raises(ValidationError, match=r"Own.*LlamaConfig.*temperature"):
        RunConfig(model=Own())
    with pytest.raises(ValidationError, match="does not divide hidden_dim"):
        RunConfig(model=SmallLlama(num_heads=7))


def roles(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, Role | None, set[Role | None]]]:
    """The dotted name, the role, and the roles below, of each setting."""
    for name, field in model.model_fields.items():
        path = f"{at}.{name}".lstrip(".")
        below = [entry for section in sections_of(field.annotation) for entry in roles(section, path)]
        yield path, role_of(field), {role for _, role, _ in below}
        yield from below


def without_role(model: type[BaseModel]) -> list[str]:
    """The settings that say nothing. A section at the top level leaves it to its settings."""
    return [
        path for path, role, below in roles(model) if role is None and (not below or path not in model.model_fields)
    ]


def test_every_setting_of_a_run_has_a_role_and_so_do_those_in_it() -> None:
    assert without_role(RunConfig) == []
    # the coefficients of losses are part of the run's identity, as its architecture is
    allowed = {path: {Role.ARCHITECTURE, Role.IDENTITY} for path in ("model.moe", "model.mtp")}
    found = [path for path, role, below in roles(RunConfig) if role and below - allowed.get(path, {role})]
    assert found == []


DECLARATIONS = dict(zip(Role, (architecture, identity, tunable, changeable, execution), strict=True))


@pytest.mark.parametrize("role", Role)
def test_a_setting_is_a_field_with_a_role(role) -> None:
    declare = DECLARATIONS[role]

    class Sizes(Section):
        depth: int = declare(3, ge=1, description="Depth")
        width: list[int] = declare(default_factory=list)
        needed: int = declare(lt=5)

    class Wide(Sizes):
        height: int = Field(1)

    assert settings_of(Wide, role) == {"depth", "width", "needed"}
    assert settings_of(Wide, *Role) == {"depth", "width", "needed"}
    assert Wide(needed=1).model_dump() == {"depth": 3, "width": [], "needed": 1, "height": 1}
    assert Wide.model_fields["depth"].description == "Depth"
    assert Wide.model_json_schema()["properties"]["depth"]["minimum"] == 1
    for wrong in ({}, {"needed": 5}, {"needed": 1, "depth": 0}):
        with pytest.raises(ValidationError):
            Wide.model_validate(wrong)


class Timed(Section):
    every: Duration | None = timedelta(minutes=15)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1d2h3m4s", 86400 + 7200 + 180 + 4), (" 1h 30m ", 5400), ("1.5h", 5400), ("0.5s", 0.5), ("0s", 0)],
)
def test_valid_durations_are_parsed(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


NO_DURATIONS = ["", "m", "-5m", "5 minutes", "30m1h", "1h1h", "1e3s", "5M", None, {"m": 5}]


@pytest.mark.parametrize("value", [15, "1.5", True, *NO_DURATIONS])
def test_anything_else_is_refused_with_an_example(value):
    with pytest.raises(PydanticCustomError, match=r"15m|90s"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (5400, "1h30m"), (86400, "1d"), (90061.5, "1d1h1m1.5s"), (0.25, "0.25s")]
)
def test_a_duration_is_formatted_in_the_largest_units(seconds, text):
    assert format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize("text", ["1d2h3m4s", "1.5h", "0s", "1000d", "0.1s", "12.345678s"])
def test_a_formatted_duration_parses_to_the_same_value(text):
    value = parse_duration(text)
    assert parse_duration(format_duration(value)) == value
    assert parse_duration(Timed(every=text).model_dump(mode="json")["every"]) == value
