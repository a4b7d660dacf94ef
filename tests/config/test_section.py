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


def test_a_value_cannot_be_changed_after_loading():
    with pytest.raises(ValidationError, match="frozen"):
        Small().count = 2


def test_an_unknown_name_is_refused():
    with pytest.raises(ValidationError) as caught:
        Small(cuont=3)
    assert [(error["type"], error["loc"]) for error in caught.value.errors()] == [("extra_forbidden", ("cuont",))]


@pytest.mark.parametrize("name", ["count", "share"])
@pytest.mark.parametrize("value", [True, False])
def test_a_bool_is_not_a_number(name, value):
    with pytest.raises(ValidationError, match="expected a number, not true or false"):
        Small(**{name: value})


@pytest.mark.parametrize("name", ["flag", "either"])
def test_a_bool_is_accepted_for_a_boolean_setting(name):
    assert getattr(Small(**{name: True}), name) is True


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is empty") for text in ("", "  ", "\n")),
        *((text, "not UTF-8") for text in ("a\0b", "caf\udce9")),
        *((text, "white space") for text in ("cache ", "\tcache", "cache\r\n")),
        ("${SCRATCH}/cache", "${SCRATCH}"),
        ("/a/$USER/b", "$USER"),
        ("$(pwd)/a", "$(pwd)"),
        ("%USERPROFILE%/a", "%USERPROFILE%"),
        ("{{ folder }}/a", "{{ folder }}"),
        ("gs://bucket/${oc.env:USER}/a", "${oc.env:USER}"),
        ("gs://$BUCKET/a", "$BUCKET"),
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


def test_a_default_is_validated_like_a_written_value():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        WrongDefault()


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
    # the coefficients of a mixture of experts are part of the run's identity, as its architecture is
    allowed = {"model.moe": {Role.ARCHITECTURE, Role.IDENTITY}}
    found = [path for path, role, below in roles(RunConfig) if role and below - allowed.get(path, {role})]
    assert found == []


def test_a_setting_without_a_role_is_found() -> None:
    class Silent(Section):
        steps: int = Field(1, description="Steps")

    class Run(Section):
        silent: Silent = changeable(default_factory=Silent, description="A section")

    assert without_role(Run) == ["silent.steps"]


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


def test_the_meaning_of_weights_is_the_architecture() -> None:
    assert LlamaConfig(seq_len=8, scan_layers=False, num_kv_heads=32).meaning() == LlamaConfig().meaning()
    assert LlamaConfig(norm_offset=True).meaning() != LlamaConfig().meaning()


class Timed(Section):
    every: Duration | None = timedelta(minutes=15)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("1h30m", 5400),
        ("1d2h3m4s", 86400 + 7200 + 180 + 4),
        (" 1h 30m ", 5400),
        ("1.5h", 5400),
        ("0.5s", 0.5),
        ("0s", 0),
    ],
)
def test_valid_durations_are_parsed(text, seconds):
    assert parse_duration(text) == timedelta(seconds=seconds)


NO_DURATIONS = ["", " ", "m", "-5m", "5 minutes", "30m1h", "1h1h", "1e3s", "5M", None, [], {"m": 5}]


@pytest.mark.parametrize("value", [15, 1.5, "15", "1.5", True, *NO_DURATIONS])
def test_anything_else_is_refused_with_an_example(value):
    with pytest.raises(PydanticCustomError, match=r"15m|90s"):
        parse_duration(value)


def test_a_duration_that_is_too_long_is_a_validation_error():
    with pytest.raises(ValidationError):
        Timed(every="99999999999999d")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (900, "15m"), (86400, "1d"), (90061.5, "1d1h1m1.5s"), (0.25, "0.25s")],
)
def test_a_duration_is_formatted_in_the_largest_units(seconds, text):
    assert format_duration(timedelta(seconds=seconds)) == text


@pytest.mark.parametrize("text", ["90s", "1d2h3m4s", "1.5h", "0.5s", "0s", "1000d", "0.1s", "12.345678s"])
def test_a_formatted_duration_parses_to_the_same_value(text):
    value = parse_duration(text)
    assert parse_duration(format_duration(value)) == value


def test_in_a_section_it_is_dumped_as_text_and_null_stays_null():
    assert Timed(every="1h30m").model_dump(mode="json") == {"every": "1h30m"}
    assert Timed(every=None).model_dump(mode="json") == {"every": None}
