"""The JSON Schema accepts the same configs as lmtrain."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from lmtrain.config.describe import sections_of
from lmtrain.config.load import shipped_configs
from lmtrain.config.schema import build_schema
from lmtrain.config.spellings import SHORT_NAMES
from lmtrain.config.yaml_loader import load_file
from lmtrain.lora.config import LoraConfig
from lmtrain.run.config import RunConfig
from lmtrain.run.trainer import TrainerConfig

SCHEMA = build_schema(RunConfig, "title")
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_is_valid_and_plain_json():
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("path", sorted(Path(shipped_configs()).glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path):
    assert [error.message for error in VALIDATOR.iter_errors(load_file(str(path)).data)] == []


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"optimizer": {"learning_rate": 1e-3, "warmup": 10, "cycles": [1, 2]}},
        {"model": {"num_layers": 2}},
        {"trainer": {"tracker": {"project": "p"}}},
        {"trainer": {"tracker": [{"type": "json"}, {"project": "p"}]}},
        {"trainer": {"checkpointer": {"save_interval": "15m", "keep": [{"every": 3}]}}},
        {"trainer": {"checkpointer": {"save_interval": None}}},
        {"data": {"train_urls": ["a"]}},
        {"data": "data/x.yaml", "model": "m.yml", "optimizer": "../o.yaml", "trainer": {"checkpointer": "c.yaml"}},
        {"<<": "base.yaml"},
    ],
)
def test_configs_that_load_are_valid(data):
    assert [error.message for error in VALIDATOR.iter_errors(data)] == []


@pytest.mark.parametrize(
    "data",
    [
        {"modle": {}},
        {"model": {"num_layer": 2}},
        {"model": {"num_layers": "two"}},
        {"model": {"num_layers": 0}},
        {"model": {"type": "gpt3"}},
        {"model": {"type": "llama", "mlp_scale": 4}},
        {"optimizer": {"lr_schedule": "cosin"}},
        {"trainer": {"tracker": {"type": "comet"}}},
        {"trainer": {"checkpointer": {"keep": [{"until": 3}]}}},
        {"data": "some text"},
    ],
)
def test_configs_that_do_not_load_are_invalid(data):
    assert list(VALIDATOR.iter_errors(data))


def test_settings_have_descriptions_and_defaults():
    trainer = SCHEMA["$defs"]["TrainerConfig"]["properties"]
    assert trainer["seed"]["description"] == "Seed of parameter initialization, dropout and data shuffling"
    assert trainer["seed"]["default"] == 0


# all sections that are a map, not a list or map of sections
SECTIONS = [
    "data",
    "data.format",
    "eval_harness",
    "lora",
    "model",
    "trainer",
    "objective",
    "optimizer",
    "trainer.checkpointer",
    "trainer.checkpointer.keep_best",
    "trainer.early_stopping",
    "trainer.ray",
    "trainer.distributed",
    "trainer.model_averaging",
    "trainer.profiler",
    "trainer.watch",
    "optimizer.skip_bad_steps",
]


def is_valid(data):
    return VALIDATOR.is_valid(data)


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_the_list_of_sections_is_complete():
    def below(model, at=""):
        for name, field in model.model_fields.items():
            kinds = sections_of(field.annotation)
            args = str(field.annotation)
            if kinds and "list[" not in args and "dict[" not in args:
                yield at + name
                if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                    yield from below(field.annotation, f"{at}{name}.")
                elif name == "optimizer":
                    yield from below(kinds[0], f"{at}{name}.")

    assert sorted(below(RunConfig)) == sorted(SECTIONS)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_may_be_the_name_of_a_yaml_file(section):
    assert is_valid(nested(section, "some/where.yaml"))
    assert is_valid(nested(section, "x.yml"))
    assert not is_valid(nested(section, "x.json"))
    assert not is_valid(nested(section, "x.yaml.bak"))
    assert not is_valid(nested(section, 3.5))


@pytest.mark.parametrize("section", SECTIONS)
def test_unknown_settings_are_invalid_in_every_section(section):
    assert not is_valid(nested(section, {"mispelt": 1}))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_accepts_a_merge_key(section):
    assert is_valid(nested(section, {"<<": "below.yaml"}))


@pytest.mark.parametrize("section", ["model", "optimizer"])
def test_a_section_of_several_kinds_accepts_known_types_only(section):
    kinds = [kind.model_fields["type"].default for kind in sections_of(RunConfig.model_fields[section].annotation)]
    for kind in kinds:
        if kind != "default":  # of `rope`, which is nested in a model
            assert is_valid({section: {"type": kind}})
    for wrong in ("zzz", "", None, 3):
        assert not is_valid({section: {"type": wrong}})


@pytest.mark.parametrize("tracker", [{"type": "wandb"}, {"type": "json"}, {"type": "tensorboard", "logdir": "x"}])
def test_a_tracker_may_be_a_map_or_in_a_list(tracker):
    assert is_valid({"trainer": {"tracker": tracker}})
    assert is_valid({"trainer": {"tracker": [tracker, {"type": "noop"}]}})
    assert not is_valid({"trainer": {"tracker": tracker | {"mispelt": 1}}})
    assert not is_valid({"trainer": {"tracker": [tracker, 3]}})


@pytest.mark.parametrize(
    "data",
    [
        {"trainer": {"seed": "one"}},
        {"trainer": {"seed": True}},
        {"trainer": {"crash_on_nan": "maybe"}},
        {"trainer": {"train_batch_size": 1.5}},
        {"data": {"train_urls": "a"}},
        {"optimizer": {"learning_rate": 0}},
        {"trainer": {"checkpointer": {"save_interval": 15}}},
        {"hf_save_dtype": "float16"},
        {"model": {"type": "llama", "rope": {"type": "ntk"}}},
        [],
        "run.yaml",
    ],
    ids=str,
)
def test_a_value_of_a_wrong_type_is_invalid(data):
    assert not is_valid(data)


def test_every_setting_of_every_section_is_described():
    described = {}
    for definition in [SCHEMA, *SCHEMA["$defs"].values()]:
        for name, setting in definition.get("properties", {}).items():
            described.setdefault(definition["title"], {})[name] = setting.get("description")
    seen = [RunConfig]
    for section in seen:
        title = "title" if section is RunConfig else section.__name__
        expected = {name: field.description for name, field in section.model_fields.items()}
        short = SHORT_NAMES.get({TrainerConfig: "trainer", LoraConfig: "lora"}.get(section), {})
        expected |= {other: expected[name] for other, name in short.items()}
        assert {name: text for name, text in described[title].items() if name != "<<"} == expected
        seen += [s for f in section.model_fields.values() for s in sections_of(f.annotation) if s not in seen]


def test_the_schema_is_deterministic_and_has_the_given_title():
    assert build_schema(RunConfig, "title") == SCHEMA
    assert build_schema(RunConfig, "other")["title"] == "other"
