"""The JSON Schema accepts the same configs as lmtrain."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from lmtrain.config.describe import sections_of
from lmtrain.config.load import shipped_configs
from lmtrain.config.spellings import build_schema
from lmtrain.config.yaml_loader import load_file
from lmtrain.run.config import RunConfig

SCHEMA = build_schema(RunConfig, "title")
VALIDATOR = Draft202012Validator(SCHEMA)


def test_the_schema_is_valid_and_plain_json():
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    seed = SCHEMA["$defs"]["TrainerConfig"]["anyOf"][0]["properties"]["seed"]
    assert seed["description"].startswith("Seed of parameter initialization")


def test_shipped_configs_are_valid():
    for path in Path(shipped_configs()).glob("*.yaml"):
        assert [error.message for error in VALIDATOR.iter_errors(load_file(str(path)).data)] == [], path


@pytest.mark.parametrize(
    "data",
    [
        {"optimizer": {"learning_rate": 1e-3, "warmup": 10, "cycles": [1, 2]}},
        {"trainer": {"tracker": [{"type": "json"}, {"project": "p"}]}},
        {"trainer": {"checkpointer": {"save_interval": "15m", "keep": [{"every": 3}]}}},
        {"data": "data/x.yaml", "model": "m.yml", "optimizer": "../o.yaml", "trainer": {"checkpointer": "c.yaml"}},
        {"trainer": {"per_device_train_parallelism": 8}, "lora": {"rank": 4}},
    ],
)
def test_configs_that_load_are_valid(data):
    assert [error.message for error in VALIDATOR.iter_errors(data)] == []


@pytest.mark.parametrize(
    "data",
    [
        {"modle": {}},
        {"model": {"type": "gpt3"}},
        {"model": {"type": "llama", "mlp_scale": 4}},
        {"data": "some text"},
        {"trainer": {"tracker": [{"type": "json"}, 3]}},
        {"trainer": {"tracker": {"type": "json", "mispelt": 1}}},
        {"trainer": {"checkpointer": {"save_interval": 15}}},
        "run.yaml",
    ],
)
def test_configs_that_do_not_load_are_invalid(data):
    assert list(VALIDATOR.iter_errors(data))


def sections(model, at=""):
    """The dotted names of all sections that are a map, not a list or map of sections."""
    for name, field in model.model_fields.items():
        kinds, text = sections_of(field.annotation), str(field.annotation)
        if kinds and "list[" not in text and "dict[" not in text:
            yield at + name
            yield from sections(kinds[0], f"{at}{name}.")


def nested(path, value):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_every_section_may_be_an_include_and_accepts_a_merge_key_but_no_unknown_setting():
    values = ["some/where.yaml", "x.yml", "x.json", "x.yaml.bak", 3.5, {"<<": "below.yaml"}, {"mispelt": 1}]
    valid = {name: [VALIDATOR.is_valid(nested(name, value)) for value in values] for name in sections(RunConfig)}
    assert {
        name: found for name, found in valid.items() if found != [True, True, False, False, False, True, False]
    } == {}
