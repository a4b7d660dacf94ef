"""Sections: immutable, unknown names are errors, booleans are not numbers; subclasses become their base."""

import pytest
from pydantic import Field, ValidationError

from lmtrain.config.section import Section, problem_of_text
from lmtrain.data.config import DataConfig
from lmtrain.models.llama.config import LlamaConfig
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import identity, run_id


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
    assert identity(subclassed) == identity(plain)
    assert identity(plain)["model"]["hidden_dim"] == 64
    assert (resolved(subclassed), run_id(subclassed, "a")) == (resolved(plain), run_id(plain, "a"))
    data = RunConfig(data=Bytes()).data
    assert (type(data), data.tokenizer) == (DataConfig, "byte")


def test_an_additional_setting_of_the_subclass_is_refused():
    with pytest.raises(ValidationError, match=r"Own.*LlamaConfig.*temperature"):
        RunConfig(model=Own())
    with pytest.raises(ValidationError, match="does not divide hidden_dim"):
        RunConfig(model=SmallLlama(num_heads=7))
