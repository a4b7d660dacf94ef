"""The JSON Schema says of a config what lmtrain says of it."""

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from lmtrain.config.load import shipped_configs
from lmtrain.config.schema import build_schema
from lmtrain.config.yaml_loader import load_file
from lmtrain.run.config import RunConfig

SCHEMA = build_schema(RunConfig, "title")
VALIDATOR = Draft202012Validator(SCHEMA)


def test_it_is_a_schema_and_plain_json():
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
def test_what_loads_is_valid(data):
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
def test_what_does_not_load_is_not_valid(data):
    assert list(VALIDATOR.iter_errors(data))


def test_editors_have_something_to_show():
    trainer = SCHEMA["$defs"]["TrainerConfig"]["properties"]
    assert trainer["seed"]["description"] == "Seed of the parameters' initial values, dropout and shuffling"
    assert trainer["seed"]["default"] == 0
